/* The inner loops of the chunk index and of the guard of changed fields.
 *
 * Each function computes what the Python function of the same name does (`compiled` in native.py finds it by its name),
 * to the bit: the tests compare the two. Python objects are read as they are; nothing is kept between calls but scratch
 * memory, which the interpreter's lock protects.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    Py_buffer view;
    const int32_t *at;
    Py_ssize_t len;
} Tokens;

static PyObject *s_tokens, *s_start, *s_parent, *s_children, *s_eligible, *s_trie, *s_num_steps;

static int take_tokens(PyObject *object, Tokens *tokens) {
    if (PyObject_GetBuffer(object, &tokens->view, PyBUF_SIMPLE) < 0) return -1;
    tokens->at = tokens->view.buf, tokens->len = tokens->view.len / 4;
    return 0;
}

static int wants(Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted) return 1;
    PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", wanted, given);
    return 0;
}

/* --- How far two arrays agree ------------------------------------------------------------------------------------ */

enum { BLOCK = 16 };

static Py_ssize_t equal_forward(const int32_t *left, const int32_t *right, Py_ssize_t limit) {
    Py_ssize_t at = 0;
    while (at + BLOCK <= limit && !memcmp(left + at, right + at, 4 * BLOCK)) at += BLOCK;
    while (at < limit && left[at] == right[at]) at++;
    return at;
}

/* The same from the ends backwards: `left` and `right` point behind the last token. */
static Py_ssize_t equal_backward(const int32_t *left, const int32_t *right, Py_ssize_t limit) {
    Py_ssize_t at = 0;
    while (at + BLOCK <= limit && !memcmp(left - at - BLOCK, right - at - BLOCK, 4 * BLOCK)) at += BLOCK;
    while (at < limit && left[-at - 1] == right[-at - 1]) at++;
    return at;
}

static PyObject *compare(PyObject *const *args, Py_ssize_t n, int is_backward) {
    Tokens left, right;
    if (!wants(n, 2) || take_tokens(args[0], &left) < 0) return NULL;
    if (take_tokens(args[1], &right) < 0) return PyBuffer_Release(&left.view), NULL;
    Py_ssize_t limit = left.len < right.len ? left.len : right.len;
    Py_ssize_t equal = is_backward ? equal_backward(left.at + left.len, right.at + right.len, limit)
                                   : equal_forward(left.at, right.at, limit);
    PyBuffer_Release(&left.view), PyBuffer_Release(&right.view);
    return PyLong_FromSsize_t(equal);
}

static PyObject *common_len(PyObject *self, PyObject *const *args, Py_ssize_t n) { return compare(args, n, 0); }
static PyObject *common_suffix_len(PyObject *self, PyObject *const *args, Py_ssize_t n) { return compare(args, n, 1); }

/* equal_around(tokens, others, middle): the last place before `middle` where two arrays of one length differ, and the
 * first from it on; -1 where they do not. */
static PyObject *equal_around(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Tokens left, right;
    if (!wants(n, 3) || take_tokens(args[0], &left) < 0) return NULL;
    if (take_tokens(args[1], &right) < 0) return PyBuffer_Release(&left.view), NULL;
    Py_ssize_t middle = PyLong_AsSsize_t(args[2]), len = left.len < right.len ? left.len : right.len;
    if (middle > len) middle = len;
    Py_ssize_t before = middle - 1 - equal_backward(left.at + middle, right.at + middle, middle);
    Py_ssize_t after = middle + equal_forward(left.at + middle, right.at + middle, len - middle);
    PyBuffer_Release(&left.view), PyBuffer_Release(&right.view);
    return Py_BuildValue("nn", before, after < len ? after : (Py_ssize_t)-1);
}

/* find_flank(old, new, probes, flank_len): see alignment.py. */
static PyObject *find_flank(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Tokens old, new;
    if (!wants(n, 4) || take_tokens(args[0], &old) < 0) return NULL;
    if (take_tokens(args[1], &new) < 0) return PyBuffer_Release(&old.view), NULL;
    Py_ssize_t len = PyLong_AsSsize_t(args[3]), found = -1, skipped = 0;
    for (Py_ssize_t probe = 0; found < 0 && probe < PyList_GET_SIZE(args[2]); probe++) {
        skipped = PyLong_AsSsize_t(PyList_GET_ITEM(args[2], probe));
        if (old.len - skipped < len) break;
        const int32_t *flank = old.at + old.len - skipped - len;
        for (Py_ssize_t at = new.len - len; found < 0 && at >= 0; at--)
            if (new.at[at] == *flank && !memcmp(new.at + at, flank, 4 * len)) found = at;
    }
    PyBuffer_Release(&old.view), PyBuffer_Release(&new.view);
    return PyErr_Occurred() ? NULL : Py_BuildValue("nn", found < 0 ? (Py_ssize_t)0 : skipped, found);
}

/* --- Paths of the trie ------------------------------------------------------------------------------------------- */

static Py_ssize_t number_of(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    Py_ssize_t number = value ? PyLong_AsSsize_t(value) : -1;
    Py_XDECREF(value);
    return number;
}

/* The eligible span of the node that holds `position`: 1, and 0 where none does. */
static int eligible_around(PyObject *node, Py_ssize_t position, Py_ssize_t *first, Py_ssize_t *last) {
    PyObject *spans = PyObject_GetAttr(node, s_eligible);
    if (!spans) return -1;
    Py_ssize_t low = 0, high = PyList_GET_SIZE(spans), found = 0;
    while (low < high) {
        Py_ssize_t middle = (low + high) / 2;
        if (PyLong_AsSsize_t(PyTuple_GET_ITEM(PyList_GET_ITEM(spans, middle), 0)) <= position)
            low = middle + 1;
        else
            high = middle;
    }
    if (low) {
        PyObject *span = PyList_GET_ITEM(spans, low - 1);
        *first = PyLong_AsSsize_t(PyTuple_GET_ITEM(span, 0)), *last = PyLong_AsSsize_t(PyTuple_GET_ITEM(span, 1));
        found = position < *last;
    }
    Py_DECREF(spans);
    return (int)found;
}

static int count_steps(PyObject *node, Py_ssize_t steps) {
    if (!steps) return 0;
    PyObject *trie = PyObject_GetAttr(node, s_trie);
    PyObject *number = trie ? PyLong_FromSsize_t(number_of(trie, s_num_steps) + steps) : NULL;
    int failed = !number || PyErr_Occurred() || PyObject_SetAttr(trie, s_num_steps, number) < 0;
    Py_XDECREF(number), Py_XDECREF(trie);
    return failed ? -1 : 0;
}

/* A node of a walk, with what is asked of it again and again. */
typedef struct {
    PyObject *node;
    Tokens tokens;
    Py_ssize_t start, end;
} Place;

/* Take over the reference to `node`. */
static int enter(Place *place, PyObject *node) {
    place->node = NULL;
    if (!node) return -1;
    PyObject *tokens = PyObject_GetAttr(node, s_tokens);
    int failed = !tokens || take_tokens(tokens, &place->tokens) < 0;
    Py_XDECREF(tokens);
    if (failed) return Py_DECREF(node), -1;
    place->node = node, place->start = number_of(node, s_start), place->end = place->start + place->tokens.len;
    return PyErr_Occurred() ? -1 : 0;
}

/* Give the buffer back; the reference to the node is the caller's. */
static PyObject *leave(Place *place) {
    PyObject *node = place->node;
    if (node) PyBuffer_Release(&place->tokens.view);
    place->node = NULL;
    return node;
}

static PyObject *equal_start(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    if (!wants(n, 6)) return NULL;
    Py_ssize_t end = PyLong_AsSsize_t(args[1]), shift = PyLong_AsSsize_t(args[2]), low = PyLong_AsSsize_t(args[4]);
    int only_eligible = PyObject_IsTrue(args[5]);
    Tokens prompt;
    if (PyErr_Occurred() || take_tokens(args[3], &prompt) < 0) return NULL;
    Place place = {0};
    Py_ssize_t at = end, steps = 0, differs = 0;
    int failed = enter(&place, Py_NewRef(args[0])) < 0;
    while (!failed && at > low) {
        while (!failed && at - shift <= place.start) {
            PyObject *node = leave(&place);
            failed = enter(&place, PyObject_GetAttr(node, s_parent)) < 0;
            Py_DECREF(node);
            steps++;
        }
        if (failed) break;
        Py_ssize_t first = place.start, last = 0;
        int found = only_eligible ? eligible_around(place.node, at - shift - 1, &first, &last) : 1;
        failed = found < 0;
        if (found <= 0) break;
        Py_ssize_t floor = low > first + shift ? low : first + shift;
        at -= equal_backward(place.tokens.at + (at - shift - place.start), prompt.at + at, at - floor);
        if (at > floor) {
            differs = 1;
            break;
        }
    }
    PyBuffer_Release(&prompt.view);
    PyObject *node = leave(&place);
    if (failed || count_steps(node, steps) < 0) return Py_XDECREF(node), NULL;
    return Py_BuildValue("(NnO)", node, at, differs ? Py_True : Py_False);
}

static PyObject *equal_end(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    if (!wants(n, 6)) return NULL;
    Py_ssize_t start = PyLong_AsSsize_t(args[1]), shift = PyLong_AsSsize_t(args[2]), stop = PyLong_AsSsize_t(args[4]);
    int only_eligible = PyObject_IsTrue(args[5]);
    Tokens prompt;
    if (PyErr_Occurred() || take_tokens(args[3], &prompt) < 0) return NULL;
    Place place = {0};
    Py_ssize_t at = start, steps = 0;
    int failed = enter(&place, Py_NewRef(args[0])) < 0;
    while (!failed && at < stop) {
        PyObject *following = place.node;
        if (at - shift >= place.end) {
            PyObject *children = PyObject_GetAttr(place.node, s_children), *key = PyLong_FromLong(prompt.at[at]);
            following = children && key ? PyDict_GetItemWithError(children, key) : NULL;
            Py_XDECREF(children), Py_XDECREF(key);
            failed = PyErr_Occurred() != NULL;
            if (!following) break;
        }
        Py_ssize_t first = 0, last = 0;
        /* The eligible span is asked for before the node is entered: where there is none the walk stays where it is. */
        int found = only_eligible ? eligible_around(following, at - shift, &first, &last) : 1;
        failed = found < 0;
        if (found <= 0) break;
        if (following != place.node) {
            Py_INCREF(following);
            Py_DECREF(leave(&place));
            failed = enter(&place, following) < 0;
            if (failed) break;
        }
        steps++;
        if (!only_eligible) last = place.end;
        Py_ssize_t limit = stop < last + shift ? stop : last + shift;
        at += equal_forward(place.tokens.at + (at - shift - place.start), prompt.at + at, limit - at);
        if (at < limit) break;
    }
    PyBuffer_Release(&prompt.view);
    PyObject *node = leave(&place);
    if (failed || count_steps(node, steps) < 0) return Py_XDECREF(node), NULL;
    return Py_BuildValue("(Nn)", node, at);
}

/* --- Endings of chunks ------------------------------------------------------------------------------------------- */

enum { ENDING_LEN = 8, SCANNED = 1024 };

/* `len` hashes from `tokens` on, which has ENDING_LEN - 1 more; a block of them at a time stays in the nearest cache. */
static void hash_block(const int32_t *tokens, Py_ssize_t len, uint32_t *hashes) {
    uint32_t one[SCANNED + 7], two[SCANNED + 6], four[SCANNED + 4];
    for (Py_ssize_t i = 0; i < len + 7; i++) {
        uint32_t mixed = (uint32_t)tokens[i] * 0x9E3779B1u;
        one[i] = mixed ^ mixed >> 15;
    }
    for (Py_ssize_t i = 0; i < len + 6; i++) two[i] = one[i] * 0x85EBCA77u + one[i + 1];
    for (Py_ssize_t i = 0; i < len + 4; i++) four[i] = two[i] * 0xC2B2AE3Du + two[i + 2];
    for (Py_ssize_t i = 0; i < len; i++) {
        uint32_t mixed = (four[i] * 0x27D4EB2Fu + four[i + 4]) * 0x165667B1u;
        hashes[i] = mixed ^ mixed >> 16;
    }
}

static PyObject *hash_endings(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Tokens tokens;
    if (!wants(n, 1) || take_tokens(args[0], &tokens) < 0) return NULL;
    Py_ssize_t total = tokens.len < ENDING_LEN ? 0 : tokens.len - ENDING_LEN + 1;
    PyObject *result = PyBytes_FromStringAndSize(NULL, 4 * total);
    if (result) {
        uint32_t *hashes = (uint32_t *)PyBytes_AS_STRING(result);
        Py_BEGIN_ALLOW_THREADS;
        for (Py_ssize_t at = 0; at < total; at += SCANNED)
            hash_block(tokens.at + at, total - at < SCANNED ? total - at : SCANNED, hashes + at);
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&tokens.view);
    return result;
}

static PyObject *find_set(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Tokens hashes;
    Py_buffer slots;
    if (!wants(n, 3) || take_tokens(args[0], &hashes) < 0) return NULL;
    if (PyObject_GetBuffer(args[1], &slots, PyBUF_SIMPLE) < 0) return PyBuffer_Release(&hashes.view), NULL;
    long shift = PyLong_AsLong(args[2]);
    Py_ssize_t count = 0;
    const uint32_t *hash = (const uint32_t *)hashes.at;
    const uint8_t *slot = slots.buf;
    int64_t *places = PyMem_RawMalloc(8 * (hashes.len + 1));
    if (places) {
        Py_BEGIN_ALLOW_THREADS;
        for (Py_ssize_t i = 0; i < hashes.len; i++) {
            places[count] = i;
            count += slot[hash[i] >> shift] >> (hash[i] & 7) & 1;
        }
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&hashes.view), PyBuffer_Release(&slots);
    PyObject *result = places ? PyBytes_FromStringAndSize((char *)places, 8 * count) : PyErr_NoMemory();
    PyMem_RawFree(places);
    return result;
}

/* --- The context rule -------------------------------------------------------------------------------------------- */

static void note_equal(const int32_t *restrict left, const int32_t *restrict right, uint8_t *restrict is_equal,
                       Py_ssize_t len) {
    for (Py_ssize_t i = 0; i < len; i++) is_equal[i] |= left[i] == right[i];
}

/* count_misfits(context, here, shifts): how many tokens of each of the two have no equal at any of the shifts. */
static PyObject *count_misfits(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Tokens context, here;
    if (!wants(n, 3) || take_tokens(args[0], &context) < 0) return NULL;
    if (take_tokens(args[1], &here) < 0) return PyBuffer_Release(&context.view), NULL;
    PyObject *shifts = PySequence_Fast(args[2], "shifts");
    uint8_t *known = shifts ? PyMem_RawCalloc(context.len + here.len + 1, 1) : NULL, *seen = known + context.len;
    Py_ssize_t num_foreign = 0, num_unseen = 0;
    if (known) {
        for (Py_ssize_t s = 0; s < PySequence_Fast_GET_SIZE(shifts); s++) {
            Py_ssize_t shift = PyLong_AsSsize_t(PySequence_Fast_GET_ITEM(shifts, s)), low = shift < 0 ? -shift : 0;
            Py_ssize_t high = context.len < here.len - shift ? context.len : here.len - shift;
            note_equal(context.at + low, here.at + low + shift, known + low, high - low);
            note_equal(context.at + low, here.at + low + shift, seen + low + shift, high - low);
        }
        for (Py_ssize_t i = 0; i < context.len; i++) num_foreign += !known[i];
        for (Py_ssize_t i = 0; i < here.len; i++) num_unseen += !seen[i];
    }
    PyMem_RawFree(known);
    PyBuffer_Release(&context.view), PyBuffer_Release(&here.view);
    if (!shifts) return NULL;
    Py_DECREF(shifts);
    if (!known) return PyErr_NoMemory();
    return PyErr_Occurred() ? NULL : Py_BuildValue("nn", num_foreign, num_unseen);
}

/* --- Words ------------------------------------------------------------------------------------------------------- */

/* Texts of tokens by id: `list[str]`. An id that is unknown has none. */
static PyObject *text_of(PyObject *texts, int64_t token) {
    return token >= 0 && token < PyList_GET_SIZE(texts) ? PyList_GET_ITEM(texts, token) : NULL;
}

static Py_ssize_t length_of(PyObject *text) { return text ? PyUnicode_GET_LENGTH(text) : 0; }
static Py_UCS4 first_of(PyObject *text) { return PyUnicode_READ_CHAR(text, 0); }
static Py_UCS4 last_of(PyObject *text) { return PyUnicode_READ_CHAR(text, PyUnicode_GET_LENGTH(text) - 1); }

static int are_joined(PyObject *before, PyObject *here) {
    return length_of(before) && length_of(here) && !Py_UNICODE_ISSPACE(last_of(before)) &&
           !Py_UNICODE_ISSPACE(first_of(here));
}

static int is_joint(Py_UCS4 sign) { return sign < 128 && sign && strchr("-_.:/@'+,", (int)sign) != NULL; }
static int is_in_number(Py_UCS4 sign) { return sign < 128 && sign && strchr(".,:-/", (int)sign) != NULL; }

static int note_word(PyObject *found, const Py_UCS4 *text, Py_ssize_t start, Py_ssize_t end, Py_ssize_t low,
                     Py_ssize_t high) {
    if (start >= high || end <= low) return 0;
    PyObject *word = PyUnicode_FromKindAndData(PyUnicode_4BYTE_KIND, text + start, end - start);
    int failed = !word || PyDict_SetItem(found, word, Py_None) < 0;
    Py_XDECREF(word);
    return failed ? -1 : 0;
}

/* The words of `text` that reach into `[low, high)`: runs of letters and digits that single signs join, and behind each
 * the runs of letters in it. */
static PyObject *split_words(const Py_UCS4 *text, Py_ssize_t len, Py_ssize_t low, Py_ssize_t high) {
    PyObject *found = PyDict_New();
    for (Py_ssize_t start = 0; found && start < len; start++) {
        if (!Py_UNICODE_ISALNUM(text[start])) continue;
        Py_ssize_t end = start, at;
        while (end < len && (Py_UNICODE_ISALNUM(text[end]) ||
                             (is_joint(text[end]) && end + 1 < len && Py_UNICODE_ISALNUM(text[end + 1]))))
            end++;
        int failed = note_word(found, text, start, end, low, high);
        for (at = start; at < end && !failed;) {
            Py_ssize_t from = at;
            while (at < end && Py_UNICODE_ISALNUM(text[at]) && !Py_UNICODE_ISDECIMAL(text[at])) at++;
            if (at > from) failed = note_word(found, text, from, at, low, high);
            at += at == from;
        }
        if (failed) Py_CLEAR(found);
        start = end;
    }
    return found;
}

/* words_in(tokens, start, end, texts, folded, most): the words that have a part in `[start, end)`. */
static PyObject *words_in(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Tokens tokens;
    if (!wants(n, 6)) return NULL;
    Py_ssize_t start = PyLong_AsSsize_t(args[1]), end = PyLong_AsSsize_t(args[2]), most = PyLong_AsSsize_t(args[5]);
    PyObject *texts = args[3], *folded = args[4];
    if (PyErr_Occurred() || take_tokens(args[0], &tokens) < 0) return NULL;
    if (end > tokens.len) end = tokens.len;
    if (start >= end) return PyBuffer_Release(&tokens.view), PyDict_New();
    Py_ssize_t first = start, last = end, low = 0, high = 0, len = 0;
    while (first > 0 && start - first < most &&
           are_joined(text_of(texts, tokens.at[first - 1]), text_of(texts, tokens.at[first])))
        first--;
    while (last < tokens.len && last - end < most &&
           are_joined(text_of(texts, tokens.at[last - 1]), text_of(texts, tokens.at[last])))
        last++;
    for (Py_ssize_t i = first; i < last; i++) len += length_of(text_of(folded, tokens.at[i]));
    Py_UCS4 *text = PyMem_RawMalloc(4 * (len + 1));
    len = 0;
    for (Py_ssize_t i = first; text && i < last; i++) {
        PyObject *part = text_of(folded, tokens.at[i]);
        if (i == start) low = len;
        for (Py_ssize_t c = 0; c < length_of(part); c++) text[len++] = PyUnicode_READ_CHAR(part, c);
        if (i == end - 1) high = len;
    }
    PyBuffer_Release(&tokens.view);
    PyObject *found = text ? split_words(text, len, low, high) : PyErr_NoMemory();
    PyMem_RawFree(text);
    return found;
}

/* nearest_break(tokens, start, end, breaks, is_last): where in `[start, end)` a token holds a line break, the last or
 * the first one; -1 where none does. */
static PyObject *nearest_break(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Tokens tokens;
    Py_buffer breaks;
    if (!wants(n, 5) || take_tokens(args[0], &tokens) < 0) return NULL;
    if (PyObject_GetBuffer(args[3], &breaks, PyBUF_SIMPLE) < 0) return PyBuffer_Release(&tokens.view), NULL;
    Py_ssize_t start = PyLong_AsSsize_t(args[1]), end = PyLong_AsSsize_t(args[2]), known = breaks.len - 1, at = -1;
    int is_last = PyObject_IsTrue(args[4]);
    if (end > tokens.len) end = tokens.len;
    for (Py_ssize_t step = 0; at < 0 && step < end - start; step++) {
        Py_ssize_t place = is_last ? end - 1 - step : start + step;
        int32_t token = tokens.at[place];
        if (((uint8_t *)breaks.buf)[token < 0 ? 0 : token < known ? token : known]) at = place;
    }
    PyBuffer_Release(&tokens.view), PyBuffer_Release(&breaks);
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(at);
}

/* One way to write a word: its first token, which holds `rest_at` characters of it, or all of it and no number. */
typedef struct {
    int32_t token, word, rest_at, next;
} Way;

typedef struct {
    Tokens tokens;
    PyObject *words, *texts, *bare, *folded;
    const uint8_t *is_rare, *signed_, *starts, *ends;
    const int64_t *first;
    int32_t num_texts, num_ways;
    int32_t *heads; /* by token: 1 + its first way */
    Way *ways;
    int32_t *num_whole; /* by word: tokens that are all of it */
    uint8_t goes_on[1 << 13];
} Search;

enum { WHOLE = -1, FREQUENT = 32 };

static int is_given_up(const Search *s, int32_t word) { return s->is_rare[word] && s->num_whole[word] > FREQUENT; }

static int64_t clipped(const Search *s, Py_ssize_t place) {
    int64_t token = place >= 0 && place < s->tokens.len ? s->tokens.at[place] : s->num_texts;
    return token < 0 ? 0 : token < s->num_texts ? token : s->num_texts;
}

static uint32_t pair(int64_t token, int64_t character) { return (uint32_t)(token * 31 + character) & 0xffff; }

/* The character of the word at `at` of what follows its first tokens: lexicon.py, `_goes_on`. */
static int goes_on(Py_UCS4 next, Py_UCS4 over_next, Py_UCS4 edge) {
    if (next && Py_UNICODE_ISALNUM(next)) return 1;
    return Py_UNICODE_ISDIGIT(edge) && is_in_number(next) && over_next && Py_UNICODE_ISDIGIT(over_next);
}

/* Whether the word begins in the token at `place` and is part of no longer one: lexicon.py, `_stands_at`. */
static int stands_at(const Search *s, PyObject *word, Py_ssize_t place, Py_ssize_t most) {
    Py_ssize_t word_len = PyUnicode_GET_LENGTH(word), len = 0;
    Py_UCS4 behind[2] = {0, 0};
    PyObject *part = text_of(s->bare, s->tokens.at[place]);
    for (Py_ssize_t at = place;;) {
        for (Py_ssize_t c = 0; c < length_of(part); c++, len++) {
            Py_UCS4 character = PyUnicode_READ_CHAR(part, c);
            if (len < word_len && character != PyUnicode_READ_CHAR(word, len)) return 0;
            if (len >= word_len && len < word_len + 2) behind[len - word_len] = character;
        }
        if (++at >= s->tokens.len || at >= place + most || len > word_len + 1) break;
        PyObject *more = text_of(s->texts, s->tokens.at[at]);
        if (!length_of(more) || Py_UNICODE_ISSPACE(first_of(more))) break;
        part = text_of(s->folded, s->tokens.at[at]);
    }
    if (len < word_len || goes_on(behind[0], behind[1], last_of(word))) return 0;
    /* The two characters before the word, from its own token and two tokens in front. */
    Py_UCS4 before[2] = {0, 0};
    Py_ssize_t num_before = 0;
    for (Py_ssize_t at = place; at >= 0 && at >= place - 2 && num_before < 2; at--) {
        PyObject *text = text_of(s->texts, s->tokens.at[at]);
        Py_ssize_t text_len = length_of(text);
        if (at == place) {
            /* A slice of Python's: where folding made the word longer than the text, it is counted from the end. */
            Py_ssize_t cut = text_len - length_of(text_of(s->bare, s->tokens.at[at]));
            text_len = cut >= 0 ? cut : text_len + cut > 0 ? text_len + cut : 0;
        }
        while (text_len > 0 && num_before < 2) before[num_before++] = PyUnicode_READ_CHAR(text, --text_len);
    }
    return !goes_on(before[0], before[1], first_of(word));
}

/* Whether the token at `place` may begin the word and does. */
static int begins(const Search *s, const Way *way, Py_ssize_t place, Py_ssize_t most) {
    PyObject *word = PyList_GET_ITEM(s->words, way->word);
    PyObject *next = place + 1 < s->tokens.len ? text_of(s->folded, s->tokens.at[place + 1]) : NULL;
    Py_ssize_t len = PyUnicode_GET_LENGTH(word) - way->rest_at;
    if (length_of(next) < len) len = length_of(next);
    for (Py_ssize_t c = 0; c < len; c++)
        if (PyUnicode_READ_CHAR(word, way->rest_at + c) != PyUnicode_READ_CHAR(next, c)) return 0;
    return stands_at(s, word, place, most);
}

static int is_edge(const Search *s, Py_ssize_t place) {
    return (s->signed_[clipped(s, place)] || !s->ends[clipped(s, place - 1)]) && !s->starts[clipped(s, place + 1)];
}

/* How many ways begin at the token of a place, where one of them may go on there. */
static Py_ssize_t num_tries(const Search *s, Py_ssize_t place) {
    Py_ssize_t num_begun = 0, token = s->tokens.at[place];
    uint32_t key = pair(token, s->first[clipped(s, place + 1)]);
    int may_begin = s->goes_on[key >> 3] >> (key & 7) & 1;
    for (int32_t i = s->heads[token]; i; i = s->ways[i - 1].next) {
        const Way *way = &s->ways[i - 1];
        if (way->rest_at == WHOLE || is_given_up(s, way->word)) continue;
        num_begun++;
        may_begin |= way->rest_at == PyUnicode_GET_LENGTH(PyList_GET_ITEM(s->words, way->word));
    }
    return may_begin ? num_begun : 0;
}

/* Where each word stands, into the lists of `found`; 1 if it takes more than `most_tries` to tell. */
static int search(Search *s, PyObject **found, Py_ssize_t most_tries, Py_ssize_t most) {
    Py_ssize_t num_places = 0, tries = 0, len = s->tokens.len;
    int32_t *places = PyMem_RawMalloc(sizeof *places * (len + 1));
    if (!places) return PyErr_NoMemory(), -1;
    for (Py_ssize_t at = 0; at < len; at++) {
        uint32_t token = (uint32_t)s->tokens.at[at];
        if (token >= (uint32_t)s->num_texts || !s->heads[token]) continue;
        places[num_places++] = (int32_t)at;
        for (int32_t i = s->heads[token]; i; i = s->ways[i - 1].next) {
            const Way *way = &s->ways[i - 1];
            PyObject *word = PyList_GET_ITEM(s->words, way->word);
            s->num_whole[way->word] += way->rest_at == WHOLE || way->rest_at == PyUnicode_GET_LENGTH(word);
        }
    }
    for (const Way *way = s->ways; way < s->ways + s->num_ways; way++) {
        PyObject *word = PyList_GET_ITEM(s->words, way->word);
        if (is_given_up(s, way->word) || way->rest_at == WHOLE || way->rest_at == PyUnicode_GET_LENGTH(word)) continue;
        uint32_t key = pair(way->token, PyUnicode_READ_CHAR(word, way->rest_at));
        s->goes_on[key >> 3] |= 1 << (key & 7);
    }
    for (Py_ssize_t p = 0; p < num_places; p++) tries += num_tries(s, places[p]);
    int outcome = tries > most_tries;
    for (Py_ssize_t p = 0; p < num_places && !outcome; p++) {
        int edge = is_edge(s, places[p]), may_begin = num_tries(s, places[p]) > 0;
        for (int32_t i = s->heads[s->tokens.at[places[p]]]; i && outcome >= 0; i = s->ways[i - 1].next) {
            const Way *way = &s->ways[i - 1];
            if (is_given_up(s, way->word)) continue;
            if (way->rest_at == WHOLE ? edge : may_begin && begins(s, way, places[p], most)) {
                PyObject *place = PyLong_FromLong(places[p]);
                if (!place || PyList_Append(found[way->word], place) < 0) outcome = -1;
                Py_XDECREF(place);
            }
        }
    }
    PyMem_RawFree(places);
    return outcome;
}

/* Note the ways to write every word, `ways[word]` being pairs of a token and `rest_at`, int32, in bytes. */
static void add_ways(Search *s, PyObject *ways) {
    for (Py_ssize_t word = 0; word < PyList_GET_SIZE(ways); word++) {
        PyObject *each = PyList_GET_ITEM(ways, word);
        const int32_t *at = (const int32_t *)PyBytes_AS_STRING(each), *end = at + PyBytes_GET_SIZE(each) / 4;
        for (; at < end; at += 2) {
            Way *way = &s->ways[s->num_ways++];
            way->token = at[0], way->word = (int32_t)word, way->rest_at = at[1], way->next = s->heads[at[0]];
            s->heads[at[0]] = s->num_ways;
        }
    }
}

/* find_words(words, is_rare, ways, tokens, book, most_tries, most): the places of each word, as a dict of lists; None
 * where it takes too long to tell. `book` is what the lexicon knows of its tokens. */
static PyObject *find_words(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    static int32_t *heads; /* zeros between calls */
    static Py_ssize_t num_heads;
    Search *s = wants(n, 7) ? PyMem_RawCalloc(1, sizeof *s) : NULL;
    if (!s) return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    Py_buffer buffers[5];
    PyObject *ways = args[2], *found = NULL, **lists = NULL;
    Py_ssize_t num_words = PyList_GET_SIZE(args[0]), num_buffers = 0, num_ways = 0;
    Py_ssize_t most_tries = PyLong_AsSsize_t(args[5]), most = PyLong_AsSsize_t(args[6]);
    PyObject *arrays[5] = {args[1]};
    s->words = args[0];
    for (int i = 0; i < 3; i++) (&s->texts)[i] = PyTuple_GET_ITEM(args[4], i);
    for (int i = 1; i < 5; i++) arrays[i] = PyTuple_GET_ITEM(args[4], i + 2);
    while (num_buffers < 5 && PyObject_GetBuffer(arrays[num_buffers], &buffers[num_buffers], PyBUF_SIMPLE) == 0)
        num_buffers++;
    int has_tokens = num_buffers == 5 && take_tokens(args[3], &s->tokens) == 0, outcome = -1;
    if (!has_tokens) goto done;
    s->is_rare = buffers[0].buf, s->signed_ = buffers[1].buf, s->starts = buffers[2].buf, s->ends = buffers[3].buf;
    s->first = buffers[4].buf, s->num_texts = (int32_t)PyList_GET_SIZE(s->texts);
    for (Py_ssize_t i = 0; i < num_words; i++) num_ways += PyBytes_GET_SIZE(PyList_GET_ITEM(ways, i)) / 8;
    if (num_heads < s->num_texts) {
        PyMem_RawFree(heads);
        heads = PyMem_RawCalloc(s->num_texts, sizeof *heads), num_heads = heads ? s->num_texts : 0;
    }
    s->heads = heads, s->ways = PyMem_RawMalloc(sizeof *s->ways * (num_ways + 1));
    s->num_whole = PyMem_RawCalloc(num_words + 1, sizeof *s->num_whole);
    lists = PyMem_RawCalloc(num_words + 1, sizeof *lists);
    if ((!heads && s->num_texts) || !s->ways || !s->num_whole || !lists) {
        PyErr_NoMemory();
        goto done;
    }
    found = PyDict_New();
    for (Py_ssize_t i = 0; found && i < num_words; i++) {
        lists[i] = PyList_New(0);
        if (!lists[i] || PyDict_SetItem(found, PyList_GET_ITEM(s->words, i), lists[i]) < 0) Py_CLEAR(found);
        Py_XDECREF(lists[i]); /* the dict holds it */
    }
    if (!found) goto done;
    add_ways(s, ways);
    outcome = search(s, lists, most_tries, most);
    for (const Way *way = s->ways; way < s->ways + s->num_ways; way++) heads[way->token] = 0;
done:
    while (num_buffers) PyBuffer_Release(&buffers[--num_buffers]);
    if (has_tokens) PyBuffer_Release(&s->tokens.view);
    PyMem_RawFree(lists), PyMem_RawFree(s->ways), PyMem_RawFree(s->num_whole), PyMem_RawFree(s);
    if (outcome == 0) return found;
    Py_XDECREF(found);
    if (outcome < 0) return NULL;
    Py_RETURN_NONE;
}

/* --- The module -------------------------------------------------------------------------------------------------- */

#define FUNCTION(NAME) {#NAME, (PyCFunction)(void (*)(void))NAME, METH_FASTCALL, NULL}
static PyMethodDef functions[] = {
    FUNCTION(common_len),  FUNCTION(common_suffix_len), FUNCTION(equal_around), FUNCTION(find_flank), FUNCTION(equal_start),
    FUNCTION(equal_end),   FUNCTION(hash_endings),      FUNCTION(find_set),         FUNCTION(count_misfits), FUNCTION(words_in),
    FUNCTION(nearest_break), FUNCTION(find_words),      {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "loops", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_loops(void) {
    struct {
        PyObject **name;
        const char *text;
    } names[] = {{&s_tokens, "tokens"}, {&s_start, "start"}, {&s_parent, "parent"}, {&s_children, "children"},
                 {&s_eligible, "eligible"}, {&s_trie, "trie"}, {&s_num_steps, "num_steps"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].name = PyUnicode_InternFromString(names[i].text))) return NULL;
    return PyModule_Create(&definition);
}
