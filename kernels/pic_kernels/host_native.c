/* Gather, rotate, scatter of KV rows in CPU memory: one pass, each row read once and written once.
 *
 * The caller has checked the operands, and the slots with `pic_slots_hold`: rows exist and none is both read and
 * written. An element is widened to float32, turned and rounded once in registers. Threads are those of the OpenMP that
 * torch has loaded.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pairs are read as little-endian words"
#endif

#define INLINE static inline __attribute__((always_inline))
#define ALIAS __attribute__((may_alias, aligned(1)))
typedef uint8_t ALIAS u8;
typedef uint16_t ALIAS u16;
typedef uint32_t ALIAS u32;
typedef uint64_t ALIAS u64;

/* Chosen on a 2-core AVX-512 server, rows of 64 to 2,048 bytes, 2026-11, not swept. Slots are prefetched a few KiB
 * ahead, within a task; tasks are short enough that a thread that wakes late leaves its share to the others. */
enum { LINE = 64, AHEAD_BYTES = 2048, TASK_BYTES = 1 << 17, STAGE_BYTES = 1 << 13, LONG_COPY = 2048 };
/* From here on whole cache lines are written past the caches: an ordinary store first reads the line that it replaces,
 * and as much as this does not stay in a core's own cache until it is read. */
enum { STREAM_FROM_BYTES = 1 << 19 };
enum { SHIFT_CACHE = 1024, ANGLES_PER_THREAD = 1 << 14 };

enum kind { F32, BF16, F16, E4M3 };
enum layout { NEOX, PAIRS };

INLINE float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* The float32 value of an element's bits, exactly. */
INLINE float widen(enum kind kind, uint32_t bits) {
    if (kind == F32) return from_bits(bits);
    if (kind == BF16) return from_bits(bits << 16);
    uint32_t sign = kind == F16 ? (bits & 0x8000) << 16 : (bits & 0x80) << 24;
    if (kind == F16) {
        uint32_t magnitude = (bits & 0x7fff) << 13;
        uint32_t normal = magnitude + ((magnitude >= 0x0f800000 ? 224u : 112u) << 23);
        /* A subnormal gets a one in front, which is then taken off: the subtraction shifts it into place. */
        float small = from_bits(magnitude + (113u << 23)) - from_bits(113u << 23);
        return from_bits((magnitude < 0x00800000 ? to_bits(small) : normal) | sign);
    }
    uint32_t magnitude = (bits & 0x7f) << 20;
    uint32_t normal = magnitude == 0x7f << 20 ? 0x7fc00000 : magnitude + (120u << 23);
    float small = from_bits(magnitude + (121u << 23)) - from_bits(121u << 23);
    return from_bits((magnitude < 0x00800000 ? to_bits(small) : normal) | sign);
}

/* The bits of `x` as an element, rounded to nearest even. A NaN stays one, E4M3 saturates at 448. */
INLINE uint32_t narrow(enum kind kind, float x) {
    uint32_t bits = to_bits(x), magnitude = bits & 0x7fffffff;
    if (kind == F32) return bits;
    /* NOTE: no choice for NaN: its payload came from a BF16, so that its lower half is zero and nothing is carried. */
    if (kind == BF16) return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    /* Below the smallest normal number the grid is even: the adder of float32 rounds to it, next to a power of two whose
     * last bit is the grid's step. */
    if (kind == F16) {
        uint32_t normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
        uint32_t small = to_bits(from_bits(magnitude) + from_bits(126u << 23)) - (126u << 23);
        uint32_t large = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
        uint32_t finite = magnitude < (113u << 23) ? small : normal;
        return (bits >> 16 & 0x8000) | (magnitude >= (143u << 23) ? large : finite);
    }
    uint32_t clamped = magnitude > 0x43e00000 ? 0x43e00000 : magnitude; /* 448 */
    uint32_t normal = (clamped + 0x7ffff + ((clamped >> 20) & 1) - (120u << 23)) >> 20;
    uint32_t small = to_bits(from_bits(clamped) + from_bits(141u << 23)) - (141u << 23);
    uint32_t finite = clamped < (121u << 23) ? small : normal;
    return (bits >> 24 & 0x80) | (magnitude > 0x7f800000 ? 0x7f : finite);
}

/* a * b + c, rounded once where the CPU can: what torch's element-wise operations do. */
INLINE float fused(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* Turn `half` pairs by the angles whose cosines and then sines are at `cos`. A NeoX pair is `half` elements apart; an
 * interleaved one is a word of twice the width, its first member in the lower half. Products are rounded as in the way in
 * torch (`host.py`): a multiplication and `addcmul_` for NeoX pairs, complex numbers for interleaved ones. */
#define TURN(NAME, KIND, ELEMENT, WORD, WIDTH)                                                                      \
    INLINE void NAME(const char *restrict from, char *restrict to, const float *restrict cos, int64_t half,         \
                     enum layout layout) {                                                                          \
        const float *restrict sin = cos + half;                                                                     \
        if (layout == NEOX) {                                                                                       \
            const ELEMENT *restrict in = (const ELEMENT *)from;                                                     \
            ELEMENT *restrict out = (ELEMENT *)to;                                                                  \
            _Pragma("omp simd") for (int64_t i = 0; i < half; i++) {                                                \
                float a = widen(KIND, in[i]), b = widen(KIND, in[i + half]);                                        \
                out[i] = narrow(KIND, fused(-b, sin[i], a * cos[i]));                                               \
                out[i + half] = narrow(KIND, fused(a, sin[i], b * cos[i]));                                         \
            }                                                                                                       \
        } else {                                                                                                    \
            const WORD *restrict in = (const WORD *)from;                                                           \
            WORD *restrict out = (WORD *)to;                                                                        \
            _Pragma("omp simd") for (int64_t i = 0; i < half; i++) {                                                \
                float a = widen(KIND, (ELEMENT)in[i]), b = widen(KIND, in[i] >> WIDTH);                             \
                WORD low = narrow(KIND, a * cos[i] - b * sin[i]);                                                   \
                WORD high = narrow(KIND, b * cos[i] + a * sin[i]);                                                  \
                out[i] = low | high << WIDTH;                                                                       \
            }                                                                                                       \
        }                                                                                                           \
    }
TURN(turn_f32, F32, u32, u64, 32)
TURN(turn_bf16, BF16, u16, u32, 16)
TURN(turn_f16, F16, u16, u32, 16)
TURN(turn_e4m3, E4M3, u8, u16, 8)

/* What one call moves. A row is `heads` heads; of each the bytes `[before, before + turned)` are turned. */
struct rows {
    int64_t row_bytes, heads, before, turned, after, half;
    const int64_t *src, *dst;
    const int32_t *which; /* a token's row of `angles`, negative for a plain copy */
    const float *angles;  /* [num_angles, 2, half]: cosines, then sines */
    int is_streamed;
};

/* `memcpy` whose call costs as much as a short row is spelled out. */
INLINE void move(char *restrict out, const char *restrict in, int64_t bytes) {
    if (bytes < LONG_COPY)
        for (; bytes >= LINE; bytes -= LINE, in += LINE, out += LINE) memcpy(out, in, LINE);
    if (bytes) memcpy(out, in, bytes);
}

/* Whole lines, past the caches where the machine has such stores. `out` starts a line. */
INLINE void stream(char *restrict out, const char *restrict in, int64_t bytes) {
#if defined(__AVX512F__)
    for (int64_t at = 0; at < bytes; at += 64) _mm512_stream_si512((void *)(out + at), _mm512_loadu_si512(in + at));
#elif defined(__SSE2__)
    for (int64_t at = 0; at < bytes; at += 16)
        _mm_stream_si128((__m128i *)(out + at), _mm_loadu_si128((const __m128i *)(in + at)));
#else
    move(out, in, bytes);
#endif
}

/* Streamed stores are ordered with nothing: without this another thread could miss them. */
INLINE void finish_streams(void) {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

INLINE void prefetch(const char *at, int64_t bytes, int is_written) {
    for (const char *end = at + bytes; at < end; at += LINE)
        if (is_written)
            __builtin_prefetch(at, 1);
        else
            __builtin_prefetch(at, 0);
}

/* The tokens `[at, end)` of one buffer. Scattered slots defeat the hardware's own prefetch, so that rows are asked for
 * ahead; lines that are streamed must not be. */
INLINE void copy_task(const struct rows *rows, const char *from, char *to, int64_t at, int64_t end,
                      int64_t row_bytes) {
    int64_t ahead = AHEAD_BYTES / row_bytes + 1;
    for (; at < end; at++) {
        int64_t next = at + ahead < end ? at + ahead : at;
        char *out = to + rows->dst[at] * row_bytes;
        const char *in = from + rows->src[at] * row_bytes;
        prefetch(from + rows->src[next] * row_bytes, row_bytes, 0);
        if (rows->is_streamed) {
            stream(out, in, row_bytes);
        } else {
            prefetch(to + rows->dst[next] * row_bytes, row_bytes, 1);
            move(out, in, row_bytes);
        }
    }
}

INLINE void turn_part(const char *in, char *out, const float *angles, enum kind kind, enum layout layout,
                      int64_t half) {
    if (kind == F32) turn_f32(in, out, angles, half, layout);
    if (kind == BF16) turn_bf16(in, out, angles, half, layout);
    if (kind == F16) turn_f16(in, out, angles, half, layout);
    if (kind == E4M3) turn_e4m3(in, out, angles, half, layout);
}

INLINE void move_row(const struct rows *rows, const char *in, char *out, int64_t which, enum kind kind,
                     enum layout layout, int64_t half) {
    if (which < 0) {
        move(out, in, rows->row_bytes);
        return;
    }
    const float *angles = rows->angles + which * 2 * half;
    int64_t before = rows->before, turned = rows->turned, after = rows->after;
    for (int64_t head = 0; head < rows->heads; head++) {
        if (before) move(out, in, before);
        turn_part(in + before, out + before, angles, kind, layout, half);
        in += before + turned, out += before + turned;
        if (after) move(out, in, after);
        in += after, out += after;
    }
}

/* The same with angles. Rows to be streamed are made in the first-level cache, several before the first leaves: a row
 * read back while its parts are still being stored would wait for them. */
INLINE void turn_task(const struct rows *shared, const char *from, char *to, int64_t at, int64_t end, enum kind kind,
                      enum layout layout, int64_t half) {
    char stage[STAGE_BYTES] __attribute__((aligned(LINE)));
    /* A copy of our own, which the rows that are written cannot overlap: it stays in registers. */
    const struct rows rows = *shared;
    const int64_t *src = rows.src, *dst = rows.dst;
    const int32_t *which = rows.which;
    int64_t row_bytes = rows.row_bytes, ahead = AHEAD_BYTES / row_bytes + 1;
    int64_t block_len = rows.is_streamed ? STAGE_BYTES / row_bytes : end - at;
    for (; at < end; at += block_len) {
        int64_t stop = at + block_len < end ? at + block_len : end;
        for (int64_t i = at; i < stop; i++) {
            int64_t next = i + ahead < end ? i + ahead : i;
            char *out = rows.is_streamed ? stage + (i - at) * row_bytes : to + dst[i] * row_bytes;
            prefetch(from + src[next] * row_bytes, row_bytes, 0);
            if (!rows.is_streamed) prefetch(to + dst[next] * row_bytes, row_bytes, 1);
            move_row(&rows, from + src[i] * row_bytes, out, which[i], kind, layout, half);
        }
        if (rows.is_streamed)
            for (int64_t i = at; i < stop; i++)
                stream(to + dst[i] * row_bytes, stage + (i - at) * row_bytes, row_bytes);
    }
}

/* The commonest widths are compiled with their loops unrolled. */
static void run_task(const struct rows *rows, const char *from, char *to, int64_t at, int64_t end, enum kind kind,
                     enum layout layout) {
    int64_t half = rows->half;
    if (!rows->turned && rows->row_bytes == 64) return copy_task(rows, from, to, at, end, 64);
    if (!rows->turned && rows->row_bytes == 128) return copy_task(rows, from, to, at, end, 128);
    if (!rows->turned) return copy_task(rows, from, to, at, end, rows->row_bytes);
#define CASE(KIND, LAYOUT, HALF, WIDTH) \
    if (kind == KIND && layout == LAYOUT && (HALF)) return turn_task(rows, from, to, at, end, KIND, LAYOUT, WIDTH);
    CASE(BF16, NEOX, half == 16, 16)
    CASE(BF16, NEOX, half == 32, 32)
    CASE(BF16, NEOX, half == 64, 64)
    CASE(BF16, PAIRS, half == 32, 32)
    CASE(BF16, NEOX, 1, half)
    CASE(BF16, PAIRS, 1, half)
    CASE(F32, NEOX, 1, half)
    CASE(F32, PAIRS, 1, half)
    CASE(F16, NEOX, 1, half)
    CASE(F16, PAIRS, 1, half)
    CASE(E4M3, NEOX, 1, half)
    CASE(E4M3, PAIRS, 1, half)
#undef CASE
}

/* Cosines and sines of `shift` positions, from the float64 product with the frequency. Quarter turns are taken off with
 * pi / 2 in three parts, each product exact before it is rounded into the sum: good for angles below 2^50. */
INLINE void form_angles(int64_t shift, const double *restrict inv_freq, int64_t half, float *restrict cos) {
    float *restrict sin = cos + half;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        double angle = (double)shift * inv_freq[i], turns = rint(angle * 0.6366197723675814);
        double x = fma(turns, -1.5707963267948966, angle);
        x = fma(turns, -6.123233995736766e-17, x);
        x = fma(turns, 1.4973849048591833e-33, x);
        /* Taylor: the error is 5e-17 at an eighth of a turn. */
        double y = x * x;
        double s = x + x * y * (-1.0 / 6 + y * (1.0 / 120 + y * (-1.0 / 5040 + y * (1.0 / 362880 +
                   y * (-1.0 / 39916800 + y * (1.0 / 6227020800 + y * (-1.0 / 1307674368000)))))));
        double c = 1 + y * (-1.0 / 2 + y * (1.0 / 24 + y * (-1.0 / 720 + y * (1.0 / 40320 + y * (-1.0 / 3628800 +
                   y * (1.0 / 479001600 + y * (-1.0 / 87178291200 + y * (1.0 / 20922789888000))))))));
        int64_t quarter = (int64_t)turns;
        double turned_c = quarter & 1 ? s : c, turned_s = quarter & 1 ? c : s;
        cos[i] = (float)((quarter + 1) & 2 ? -turned_c : turned_c);
        sin[i] = (float)(quarter & 2 ? -turned_s : turned_s);
    }
}

/* Give every token its row of angles and every row its shift; the number of rows. Shifts come in long stretches, so
 * that one remembered in a small cache is enough: a row may be there twice. */
static int64_t number_shifts(const void *shifts, int shift_bytes, int64_t n, int32_t *which, int64_t *distinct) {
    int32_t seen[SHIFT_CACHE];
    memset(seen, 0xff, sizeof seen);
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t shift = shift_bytes == 4 ? ((const int32_t *)shifts)[i] : ((const int64_t *)shifts)[i];
        int32_t *at = seen + (shift & (SHIFT_CACHE - 1));
        if (shift && (*at < 0 || distinct[*at] != shift)) {
            distinct[count] = shift;
            *at = (int32_t)count++;
        }
        which[i] = shift ? *at : -1;
    }
    return count;
}

/* For every layer and token, `copied[dst] = copied_from[src]` and `turned[dst] = R(shift) turned_from[src]`: `R` turns
 * `2 * half` elements from `offset` on in each of the `heads` of a row. Both `copied` may be NULL.
 *
 * Returns 0 without having written anything if there is no memory for the angles, else 1. */
int pic_splice(char *const *copied_from, char *const *copied, char *const *turned_from, char *const *turned,
               int64_t num_layers, int64_t copied_bytes, int64_t heads, int64_t dim, int64_t offset, int64_t half,
               int layout, int kind, const double *inv_freq, const int64_t *src, const int64_t *dst,
               const void *shifts, int shift_bytes, int64_t n, int num_threads) {
    int64_t bytes = kind == F32 ? 4 : kind == E4M3 ? 1 : 2;
    struct rows copies = {.row_bytes = copied_bytes, .src = src, .dst = dst};
    struct rows turns = {.row_bytes = heads * dim * bytes, .heads = heads, .before = offset * bytes,
                         .turned = 2 * half * bytes, .after = (dim - offset - 2 * half) * bytes, .half = half,
                         .src = src, .dst = dst};
    int32_t *which = malloc(n * sizeof *which);
    int64_t *distinct = malloc(n * sizeof *distinct);
    int64_t count = which && distinct ? number_shifts(shifts, shift_bytes, n, which, distinct) : 0;
    float *angles = malloc((count + 1) * 2 * half * sizeof *angles);
    if (!which || !distinct || !angles) {
        free(which), free(distinct), free(angles);
        return 0;
    }
#pragma omp parallel for schedule(static) num_threads(num_threads) if (count * half > ANGLES_PER_THREAD)
    for (int64_t row = 0; row < count; row++) form_angles(distinct[row], inv_freq, half, angles + row * 2 * half);
    turns.which = which, turns.angles = angles;
    uintptr_t starts = copied_bytes | turns.row_bytes;
    for (int64_t layer = 0; layer < num_layers; layer++)
        starts |= (copied ? (uintptr_t)copied[layer] : 0) | (uintptr_t)turned[layer];
    int64_t token_bytes = copied_bytes + turns.row_bytes;
    int is_large = starts % LINE == 0 && token_bytes * num_layers * n >= STREAM_FROM_BYTES;
    copies.is_streamed = is_large;
    turns.is_streamed = is_large && turns.row_bytes <= STAGE_BYTES;
    int64_t per_task = 2 * TASK_BYTES / token_bytes + 1, tasks = (n + per_task - 1) / per_task;
    int64_t tables = copied ? 2 : 1;
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for collapse(3) schedule(dynamic) nowait
        for (int64_t table = 0; table < tables; table++)
            for (int64_t layer = 0; layer < num_layers; layer++)
                for (int64_t task = 0; task < tasks; task++) {
                    int64_t at = task * per_task, end = at + per_task < n ? at + per_task : n;
                    if (copied && !table)
                        run_task(&copies, copied_from[layer], copied[layer], at, end, kind, layout);
                    else
                        run_task(&turns, turned_from[layer], turned[layer], at, end, kind, layout);
                }
        finish_streams();
    }
    free(which), free(distinct), free(angles);
    return 1;
}

/* Whether all slots are in `[0, num_slots)`, `dst` names none twice and none of `src`. 0 also where there is no memory to
 * find out. */
int pic_slots_hold(const int64_t *src, const int64_t *dst, int64_t n, int64_t num_slots) {
    uint64_t outside = 0;
    for (int64_t i = 0; i < n; i++)
        outside |= ((uint64_t)src[i] >= (uint64_t)num_slots) | ((uint64_t)dst[i] >= (uint64_t)num_slots);
    uint64_t *written = outside ? NULL : calloc(num_slots / 64 + 1, sizeof *written), broken = 0;
    if (!written) return 0;
    for (int64_t i = 0; i < n; i++) {
        uint64_t *word = written + dst[i] / 64, bit = (uint64_t)1 << dst[i] % 64;
        broken |= *word & bit;
        *word |= bit;
    }
    for (int64_t i = 0; i < n; i++) broken |= written[src[i] / 64] >> src[i] % 64 & 1;
    free(written);
    return !broken;
}
