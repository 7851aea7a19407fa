// Self-attention over sequences packed end to end: the C++ bodies of varlen_attention.py, one for each instruction set.
// Knows lengths and heads. Starts no threads and keeps nothing between calls, so several threads may call at once.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

struct Bfloat16 {
    uint16_t bits;
};

constexpr int64_t ALIGNMENT = 64;

int64_t round_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

template <class Element>
struct Call {
    const Element* qkv;  // [total_tokens, (heads + 2 * kv_heads) * head_dim]
    Element* out;        // [total_tokens, heads * head_dim]
    int64_t heads, kv_heads, head_dim;
    bool causal;
    float* scratch;  // scratch_floats(longest, head_dim) of them
};

// What attend() lays out, for any width: keys, values, and of up to 8 queries themselves, scores and output.
int64_t scratch_floats(int64_t length, int64_t head_dim) {
    const int64_t keys = round_up(length, 16), dims = round_up(head_dim, 16);
    return 2 * keys * dims + 8 * (keys + 2 * dims);
}

}  // namespace

// The width is in floats. Rows of a block times two vectors are accumulators, and should leave registers for operands.
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma")))
#define WIDTH 16
#define BLOCK_ROWS 8
namespace avx512 {
#include "varlen_attention_body.h"
}
#undef TARGET
#undef WIDTH
#undef BLOCK_ROWS

#define TARGET __attribute__((target("avx2,fma")))
#define WIDTH 8
#define BLOCK_ROWS 4
namespace avx2 {
#include "varlen_attention_body.h"
}
#undef TARGET
#undef WIDTH
#undef BLOCK_ROWS

#define TARGET
#define WIDTH 4
#define BLOCK_ROWS 4
namespace portable {
#include "varlen_attention_body.h"
}

namespace {

enum Body { FASTEST = 0, PORTABLE = 1, AVX2 = 2, AVX512 = 3 };

bool supports(int64_t body) {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (body == PORTABLE) return true;
    if (body == AVX2) return avx2;
    return body == AVX512 && avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
}

template <class Element>
int32_t run(const void* qkv, void* out, int64_t total_tokens, const int64_t* groups, int64_t group_count,
            int64_t heads, int64_t kv_heads, int64_t head_dim, bool causal, int64_t body) {
    if (group_count == 0) return 0;
    const int64_t* last = groups + 3 * (group_count - 1);
    const int64_t longest = last[2];  // ascending
    const int64_t bytes = round_up(4 * scratch_floats(longest, head_dim), ALIGNMENT);
    float* scratch = static_cast<float*>(std::aligned_alloc(ALIGNMENT, static_cast<size_t>(bytes)));
    if (scratch == nullptr) return 2;
    const Call<Element> call{static_cast<const Element*>(qkv), static_cast<Element*>(out), heads, kv_heads, head_dim,
                             causal, scratch};
    const auto attend = body == AVX512 ? avx512::attend<Element>
                        : body == AVX2 ? avx2::attend<Element>
                                       : portable::attend<Element>;
    for (const int64_t* group = groups; group <= last; group += 3)
        for (int64_t row = 0; row < group[1]; ++row) attend(call, group[0] + row * group[2], group[2]);
    std::free(scratch);
    const int64_t end = last[0] + last[1] * last[2], hidden = heads * head_dim;
    std::memset(static_cast<void*>(call.out + end * hidden), 0, sizeof(Element) * (total_tokens - end) * hidden);
    return 0;
}

}  // namespace

// groups [group_count, 3]: first token, rows, length; in ascending order. Tokens behind the last group become zero.
// -> 0; 1 when this machine lacks the body; 2 when there is no memory. body: 0 takes the fastest.
extern "C" int32_t varlen_attention(const void* qkv, void* out, int64_t is_bfloat16, int64_t total_tokens,
                                    const int64_t* groups, int64_t group_count, int64_t heads, int64_t kv_heads,
                                    int64_t head_dim, int64_t causal, int64_t body) {
    if (body == FASTEST) body = supports(AVX512) ? AVX512 : supports(AVX2) ? AVX2 : PORTABLE;
    if (!supports(body)) return 1;
    const auto attend = is_bfloat16 ? run<Bfloat16> : run<float>;
    return attend(qkv, out, total_tokens, groups, group_count, heads, kv_heads, head_dim, causal != 0, body);
}
