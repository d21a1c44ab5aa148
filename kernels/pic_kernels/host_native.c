/* Gather, rotate, scatter of KV rows in CPU memory: one pass, each row read once and written once.
 *
 * Owns the inner loops only: operands were checked by the caller, slots exist, and no row is both read and written. A
 * 16-bit row is widened, turned and rounded in registers. Threads are those of the OpenMP that torch has loaded.
 */
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pairs are read as little-endian words"
#endif

#define ALIAS(bytes) __attribute__((may_alias, aligned(bytes)))
typedef uint16_t ALIAS(1) u16;
typedef uint32_t ALIAS(1) u32;
typedef float ALIAS(1) f32;

/* Scattered slots defeat the hardware's own prefetch, so rows are asked for this many bytes before they are moved.
 * Swept on a 2-core AVX-512 server over rows of 64 to 2,048 bytes, 2026-11; a task is long because each starts cold. */
enum { LINE = 64, AHEAD_BYTES = 4096, TOKENS_PER_TASK = 1024, LONG_COPY = 2048 };

static inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* The upper half of the result is `x` as bfloat16, rounded to nearest even. A NaN keeps its upper half, made quiet:
 * rounding could carry it into an infinity. */
static inline uint32_t bf16_rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return (bits & 0x7fffffff) > 0x7f800000 ? bits | 0x00400000 : rounded;
}

static void turn_neox_bf16(const u16 *restrict in, u16 *restrict out, const float *restrict cos,
                           const float *restrict sin, int64_t half) {
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float a = from_bits((uint32_t)in[i] << 16), b = from_bits((uint32_t)in[i + half] << 16);
        out[i] = bf16_rounded(a * cos[i] - b * sin[i]) >> 16;
        out[i + half] = bf16_rounded(b * cos[i] + a * sin[i]) >> 16;
    }
}

/* A pair is one 32-bit word, its first member in the lower half. */
static void turn_pairs_bf16(const u32 *restrict in, u32 *restrict out, const float *restrict cos,
                            const float *restrict sin, int64_t half) {
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float a = from_bits(in[i] << 16), b = from_bits(in[i] & 0xffff0000);
        uint32_t low = bf16_rounded(a * cos[i] - b * sin[i]), high = bf16_rounded(b * cos[i] + a * sin[i]);
        out[i] = low >> 16 | (high & 0xffff0000);
    }
}

static void turn_neox_f32(const f32 *restrict in, f32 *restrict out, const float *restrict cos,
                          const float *restrict sin, int64_t half) {
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float a = in[i], b = in[i + half];
        out[i] = a * cos[i] - b * sin[i];
        out[i + half] = b * cos[i] + a * sin[i];
    }
}

static void turn_pairs_f32(const f32 *restrict in, f32 *restrict out, const float *restrict cos,
                           const float *restrict sin, int64_t half) {
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float a = in[2 * i], b = in[2 * i + 1];
        out[2 * i] = a * cos[i] - b * sin[i];
        out[2 * i + 1] = b * cos[i] + a * sin[i];
    }
}

static void turn(const char *in, char *out, const float *cos, const float *sin, int64_t half, int is_neox,
                 int element_bytes) {
    if (element_bytes == 2 && is_neox)
        turn_neox_bf16((const u16 *)in, (u16 *)out, cos, sin, half);
    else if (element_bytes == 2)
        turn_pairs_bf16((const u32 *)in, (u32 *)out, cos, sin, half);
    else if (is_neox)
        turn_neox_f32((const f32 *)in, (f32 *)out, cos, sin, half);
    else
        turn_pairs_f32((const f32 *)in, (f32 *)out, cos, sin, half);
}

/* `memcpy` whose call costs as much as a short row is spelled out. */
static inline void move(char *restrict out, const char *restrict in, int64_t bytes) {
    if (bytes < LONG_COPY)
        for (; bytes >= LINE; bytes -= LINE, in += LINE, out += LINE) memcpy(out, in, LINE);
    if (bytes) memcpy(out, in, bytes);
}

static inline void prefetch(const char *in, const char *out, int64_t row_bytes) {
    for (int64_t at = 0; at < row_bytes; at += LINE) {
        __builtin_prefetch(in + at, 0);
        __builtin_prefetch(out + at, 1);
    }
}

static inline int64_t rows_ahead(int64_t row_bytes) {
    return row_bytes < AHEAD_BYTES ? (AHEAD_BYTES + row_bytes - 1) / row_bytes : 1;
}

/* buffer[dst] = buffer[src] for every buffer; `[num_slots, row_bytes]` each. */
void pic_copy_rows(char *const *buffers, int64_t num_buffers, int64_t row_bytes, const int64_t *src,
                   const int64_t *dst, int64_t n, int num_threads) {
    int64_t tasks = (n + TOKENS_PER_TASK - 1) / TOKENS_PER_TASK, ahead = rows_ahead(row_bytes);
#pragma omp parallel for collapse(2) schedule(static) num_threads(num_threads)
    for (int64_t layer = 0; layer < num_buffers; layer++)
        for (int64_t task = 0; task < tasks; task++) {
            char *buffer = buffers[layer];
            int64_t end = (task + 1) * TOKENS_PER_TASK < n ? (task + 1) * TOKENS_PER_TASK : n;
            for (int64_t i = task * TOKENS_PER_TASK; i < end; i++) {
                int64_t next = i + ahead < end ? i + ahead : i;
                prefetch(buffer + src[next] * row_bytes, buffer + dst[next] * row_bytes, row_bytes);
                move(buffer + dst[i] * row_bytes, buffer + src[i] * row_bytes, row_bytes);
            }
        }
}

/* The same, with `2 * half` elements from `offset` on in each of the `heads` of a row turned by the angles
 * `cos[which[i]]`, `sin[which[i]]` (`[num_angles, half]`); a negative `which[i]` is a plain copy. */
void pic_rotate_rows(char *const *buffers, int64_t num_buffers, int64_t heads, int64_t dim, int64_t offset,
                     int64_t half, int is_neox, int element_bytes, const int64_t *src, const int64_t *dst,
                     const int64_t *which, const float *cos, const float *sin, int64_t n, int num_threads) {
    int64_t head_bytes = dim * element_bytes, row_bytes = heads * head_bytes;
    int64_t before = offset * element_bytes, turned = 2 * half * element_bytes, after = head_bytes - before - turned;
    int64_t tasks = (n + TOKENS_PER_TASK - 1) / TOKENS_PER_TASK, ahead = rows_ahead(row_bytes);
#pragma omp parallel for collapse(2) schedule(static) num_threads(num_threads)
    for (int64_t layer = 0; layer < num_buffers; layer++)
        for (int64_t task = 0; task < tasks; task++) {
            char *buffer = buffers[layer];
            int64_t end = (task + 1) * TOKENS_PER_TASK < n ? (task + 1) * TOKENS_PER_TASK : n;
            for (int64_t i = task * TOKENS_PER_TASK; i < end; i++) {
                const char *in = buffer + src[i] * row_bytes;
                char *out = buffer + dst[i] * row_bytes;
                int64_t next = i + ahead < end ? i + ahead : i;
                prefetch(buffer + src[next] * row_bytes, buffer + dst[next] * row_bytes, row_bytes);
                if (which[i] < 0) {
                    move(out, in, row_bytes);
                    continue;
                }
                const float *c = cos + which[i] * half, *s = sin + which[i] * half;
                for (int64_t head = 0; head < heads; head++, in += head_bytes, out += head_bytes) {
                    move(out, in, before);
                    turn(in + before, out + before, c, s, half, is_neox, element_bytes);
                    move(out + before + turned, in + before + turned, after);
                }
            }
        }
}
