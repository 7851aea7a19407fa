// One sequence's attention in vectors of WIDTH floats; included by varlen_attention.cpp once for each instruction set,
// in a namespace of its own, with TARGET, WIDTH and BLOCK_ROWS defined. Lambdas would not inherit TARGET.

#define INLINE TARGET __attribute__((always_inline)) inline

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));

namespace {

INLINE Floats load(const float* from) {
    Floats floats;
    __builtin_memcpy(&floats, from, sizeof floats);
    return floats;
}

INLINE Floats load(const Bfloat16* from) {
    Halves halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

INLINE void store(float* to, Floats floats) { __builtin_memcpy(to, &floats, sizeof floats); }

// To the nearest, ties to even; a NaN stays one.
INLINE void store(Bfloat16* to, Floats floats) {
    const Words bits = (Words)floats;
    const Words rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    const Words quiet = (bits >> 16) | 0x40;
    const Halves halves = __builtin_convertvector(floats != floats ? quiet : rounded, Halves);
    __builtin_memcpy(to, &halves, sizeof halves);
}

// The first `count` of WIDTH, zeros behind.
template <class Element>
INLINE Floats load_part(const Element* from, int64_t count) {
    if (count >= WIDTH) return load(from);
    Element part[WIDTH] = {};
    for (int64_t i = 0; i < count; ++i) part[i] = from[i];
    return load(part);
}

template <class Element>
INLINE void store_part(Element* to, Floats floats, int64_t count) {
    if (count >= WIDTH) return store(to, floats);
    Element part[WIDTH];
    store(part, floats);
    for (int64_t i = 0; i < count; ++i) to[i] = part[i];
}

INLINE Ints lanes() {
    Ints numbers;
    for (int i = 0; i < WIDTH; ++i) numbers[i] = i;
    return numbers;
}

INLINE float highest_lane(Floats floats) {
#pragma GCC unroll 4
    for (int step = WIDTH / 2; step; step /= 2) {
        const Floats other = __builtin_shuffle(floats, lanes() ^ step);
        floats = other > floats ? other : floats;
    }
    return floats[0];
}

INLINE float sum_lanes(Floats floats) {
#pragma GCC unroll 4
    for (int step = WIDTH / 2; step; step /= 2) floats += __builtin_shuffle(floats, lanes() ^ step);
    return floats[0];
}

// 2 ** x for x <= 0, relative error 1.2e-7 down to 2 ** -126, 0 at -127 and below; a NaN stays one. The comparison is
// that way round, and the power of two is multiplied rather than added to the exponent's bits, to keep it.
INLINE Floats exp2_negative(Floats x) {
    x = x < -127.0f ? -127.0f - Floats{} : x;
    const Floats shifted = x + 12582912.0f;  // 1.5 * 2 ** 23: the nearest integer is in the lowest bits
    const Floats fraction = x - (shifted - 12582912.0f);
    Floats power = fraction * 1.5403530393381608e-4f + 1.3333558146428443e-3f;
    power = power * fraction + 9.6181291076284772e-3f;
    power = power * fraction + 5.5504108664821580e-2f;
    power = power * fraction + 2.4022650695910072e-1f;
    power = power * fraction + 6.9314718055994531e-1f;
    power = power * fraction + 1.0f;
    return power * (Floats)(((Words)shifted << 23) + 0x3F800000);
}

template <int STEP>
INLINE void swap_blocks(Floats* rows) {
    const Ints upper = (lanes() & STEP) != 0;
    const Ints first = upper ? lanes() - STEP + WIDTH : lanes(), second = upper ? lanes() + WIDTH : lanes() + STEP;
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; ++i) {
        if (i & STEP) continue;
        const Floats a = rows[i], b = rows[i + STEP];
        rows[i] = __builtin_shuffle(a, b, first);
        rows[i + STEP] = __builtin_shuffle(a, b, second);
    }
}

INLINE void transpose(Floats* rows) {
    if constexpr (WIDTH > 8) swap_blocks<8 % WIDTH>(rows);
    if constexpr (WIDTH > 4) swap_blocks<4 % WIDTH>(rows);
    swap_blocks<2>(rows);
    swap_blocks<1>(rows);
}

// A panel is [depth, up to two vectors]: what multiply() reads in one go. All but the last are two vectors wide.
INLINE float* panel_at(float* panels, int64_t column, int64_t columns, int64_t depth, int64_t* width) {
    const int64_t first = column / (2 * WIDTH) * (2 * WIDTH), rest = columns - first;
    *width = rest > WIDTH ? 2 * WIDTH : WIDTH;
    return panels + first * depth + (column - first);
}

// keys [length, head_dim] -> panels with a column a key and a row a dim; zeros behind the last key.
template <class Element>
INLINE void pack_transposed(const Element* keys, int64_t stride, int64_t length, int64_t head_dim, float* panels) {
    for (int64_t key = 0; key < length; key += WIDTH) {
        int64_t width;
        float* panel = panel_at(panels, key, length, head_dim, &width);
        const int64_t present = length - key;
        for (int64_t dim = 0; dim < head_dim; dim += WIDTH) {
            Floats rows[WIDTH];
            const int64_t count = head_dim - dim;
            if (present >= WIDTH && count >= WIDTH) {
#pragma GCC unroll 16
                for (int i = 0; i < WIDTH; ++i) rows[i] = load(keys + (key + i) * stride + dim);
            } else {
                for (int i = 0; i < WIDTH; ++i)
                    rows[i] = i < present ? load_part(keys + (key + i) * stride + dim, count) : Floats{};
            }
            transpose(rows);
            if (count >= WIDTH) {
#pragma GCC unroll 16
                for (int i = 0; i < WIDTH; ++i) store(panel + (dim + i) * width, rows[i]);
            } else {
                for (int i = 0; i < count; ++i) store(panel + (dim + i) * width, rows[i]);
            }
        }
    }
}

// values [length, head_dim] -> panels with a column a dim and a row a key; zeros behind the last dim.
template <class Element>
INLINE void pack(const Element* values, int64_t stride, int64_t length, int64_t head_dim, float* panels) {
    for (int64_t dim = 0; dim < head_dim; dim += WIDTH) {
        int64_t width;
        float* panel = panel_at(panels, dim, head_dim, length, &width);
        for (int64_t key = 0; key < length; ++key)
            store(panel + key * width, load_part(values + key * stride + dim, head_dim - dim));
    }
}

// [ROWS, depth] x [depth, VECTORS * WIDTH]
template <int ROWS, int VECTORS>
TARGET void multiply_block(const float* left, int64_t left_stride, const float* panel, int64_t depth, float* product,
                           int64_t product_stride) {
    Floats sums[ROWS][VECTORS] = {};
    for (int64_t k = 0; k < depth; ++k) {
        Floats right[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) right[v] = load(panel + (k * VECTORS + v) * WIDTH);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; ++v) sums[row][v] += left[row * left_stride + k] * right[v];
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) store(product + row * product_stride + v * WIDTH, sums[row][v]);
    }
}

// rows: at most ROWS
template <int ROWS, int VECTORS>
INLINE void multiply_rows(int64_t rows, const float* left, int64_t left_stride, const float* panel, int64_t depth,
                          float* product, int64_t product_stride) {
    if (rows == ROWS) return multiply_block<ROWS, VECTORS>(left, left_stride, panel, depth, product, product_stride);
    if constexpr (ROWS > 1)
        multiply_rows<ROWS - 1, VECTORS>(rows, left, left_stride, panel, depth, product, product_stride);
}

// Of panels [panel_depth, panel_columns] the first `depth` rows and, rounded up to a panel, the first `columns`.
INLINE void multiply(int64_t rows, const float* left, int64_t left_stride, const float* panels, int64_t panel_depth,
                     int64_t panel_columns, int64_t depth, int64_t columns, float* product, int64_t product_stride) {
    for (int64_t column = 0; column < columns; column += 2 * WIDTH) {
        const float* panel = panels + column * panel_depth;
        if (panel_columns - column > WIDTH)
            multiply_rows<BLOCK_ROWS, 2>(rows, left, left_stride, panel, depth, product + column, product_stride);
        else
            multiply_rows<BLOCK_ROWS, 1>(rows, left, left_stride, panel, depth, product + column, product_stride);
    }
}

// scores [seen, and room up to a whole vector] -> 2 ** (score - highest) of the first `length`, zeros behind. -> the sum
INLINE float exponentiate(float* scores, int64_t length, int64_t seen) {
    const int64_t whole = (length - 1) / WIDTH * WIDTH;  // the last vector begins here
    const Floats rest = load(scores + whole);
    store(scores + whole, lanes() < (int32_t)(length - whole) ? rest : -INFINITY - Floats{});
    Floats highest = load(scores);
    for (int64_t i = WIDTH; i < length; i += WIDTH) {
        const Floats some = load(scores + i);
        highest = some > highest ? some : highest;
    }
    const float top = highest_lane(highest);
    Floats sum = {};
    for (int64_t i = 0; i < length; i += WIDTH) {
        const Floats power = exp2_negative(load(scores + i) - top);
        store(scores + i, power);
        sum += power;
    }
    for (int64_t i = whole + WIDTH; i < seen; i += WIDTH) store(scores + i, Floats{});
    return sum_lanes(sum);
}

template <class Element>
TARGET void attend(const Call<Element>& call, int64_t start, int64_t length) {
    const int64_t dims = call.head_dim, hidden = call.heads * dims, sharing = call.heads / call.kv_heads;
    const int64_t stride = hidden + 2 * call.kv_heads * dims;
    const int64_t keys_width = round_up(length, WIDTH), dims_width = round_up(dims, WIDTH);
    float* keys = call.scratch;
    float* values = keys + keys_width * dims_width;
    float* queries = values + keys_width * dims_width;
    float* scores = queries + BLOCK_ROWS * dims_width;
    float* products = scores + BLOCK_ROWS * keys_width;
    const float scale = 1.44269504088896341f / sqrtf((float)dims);  // log2(e): the softmax is in powers of two
    for (int64_t head = 0; head < call.heads; ++head) {
        const Element* from = call.qkv + start * stride + head * dims;
        if (head % sharing == 0) {
            const Element* shared = call.qkv + start * stride + hidden + head / sharing * dims;
            pack_transposed(shared, stride, length, dims, keys);
            pack(shared + call.kv_heads * dims, stride, length, dims, values);
        }
        for (int64_t query = 0; query < length; query += BLOCK_ROWS) {
            const int64_t rows = length - query < BLOCK_ROWS ? length - query : BLOCK_ROWS;
            const int64_t seen = call.causal ? query + rows : length;  // keys, by the last of these queries
            for (int64_t row = 0; row < rows; ++row)
                for (int64_t dim = 0; dim < dims; dim += WIDTH)
                    store(queries + row * dims_width + dim,
                          load_part(from + (query + row) * stride + dim, dims - dim) * scale);
            multiply(rows, queries, dims_width, keys, dims, length, dims, seen, scores, keys_width);
            float sums[BLOCK_ROWS];
            for (int64_t row = 0; row < rows; ++row)
                sums[row] = exponentiate(scores + row * keys_width, call.causal ? query + row + 1 : length, seen);
            multiply(rows, scores, keys_width, values, length, dims, seen, dims, products, dims_width);
            for (int64_t row = 0; row < rows; ++row) {
                Element* out = call.out + (start + query + row) * hidden + head * dims;
                for (int64_t dim = 0; dim < dims; dim += WIDTH)
                    store_part(out + dim, load(products + row * dims_width + dim) * (1.0f / sums[row]), dims - dim);
            }
        }
    }
}

}  // namespace

#undef INLINE
