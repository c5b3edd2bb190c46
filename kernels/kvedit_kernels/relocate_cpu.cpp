// Relocation of KV rows on the CPU: K rotated, V copied, runs of consecutive slots at memory speed.
//
// A plain shared library without Python or torch headers; relocate_cpu.py calls it through ctypes.
// setup.py builds it once per instruction set. Bit-equal to relocate_ref: fp32 arithmetic without
// contraction into fused multiply-add (-ffp-contract=off), one rounding to nearest even.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <new>
#include <thread>
#include <vector>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

// Mirrored by relocate_cpu.py: field order and widths must match.
struct Layout {
    const int64_t *base;     // [num_layers] addresses; null without V
    int64_t page_bytes, token_bytes, head_bytes;
    int64_t row_bytes;       // of one head
};

struct Job {
    Layout k, v;
    const int64_t *src, *dst;  // [num_tokens] slots
    const int32_t *row;        // [num_tokens]; null: copy K too
    const float *cos_sin;      // [num_rows, 2, rot_dim / 2]
    const uint8_t *still;      // [num_rows] 1: the row turns nothing
    int64_t num_layers, num_tokens, num_heads, page_size;
    int64_t rot_offset, rot_dim;
    int64_t dtype;             // 0 fp32, 1 bf16, 2 fp16
    int64_t is_neox, num_threads;
};

enum Dtype { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Tokens [start, start + count): consecutive slots on both sides, one rotation row, and for paged
// layouts inside one page on both sides.
struct Run {
    int64_t start, count;
};

inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// bf16 as the upper half of fp32: the carry of the added bias rounds to nearest even. A nan would
// carry into infinity, so it becomes the quiet one.
inline uint32_t bf16_bits(float value) {
    const uint32_t bits = to_bits(value);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return value != value ? 0x7FC0u : rounded;
}

struct Float32 {
    using Cell = float;
    static float up(Cell cell) { return cell; }
    static Cell down(float value) { return value; }
};

struct BFloat16 {
    using Cell = uint16_t;
    static float up(Cell cell) { return from_bits(uint32_t(cell) << 16); }
    static Cell down(float value) { return Cell(bf16_bits(value)); }
};

// `ivdep`: src and dst rows are disjoint or the same row, so no iteration depends on another.
template <class T>
inline __attribute__((always_inline)) void turn_neox(const typename T::Cell *src,
                                                     typename T::Cell *dst, const float *cos,
                                                     const float *sin, int64_t half) {
#pragma GCC ivdep
    for (int64_t j = 0; j < half; ++j) {
        const float a = T::up(src[j]), b = T::up(src[half + j]);
        dst[j] = T::down(a * cos[j] - b * sin[j]);
        dst[half + j] = T::down(b * cos[j] + a * sin[j]);
    }
}

inline void turn_gptj(const float *src, float *dst, const float *cos, const float *sin,
                      int64_t half) {
#pragma GCC ivdep
    for (int64_t j = 0; j < half; ++j) {
        const float a = src[2 * j], b = src[2 * j + 1];
        dst[2 * j] = a * cos[j] - b * sin[j];
        dst[2 * j + 1] = b * cos[j] + a * sin[j];
    }
}

// A pair of bf16 is one 32-bit word: no shuffles.
inline void turn_gptj_bf16(const uint32_t *src, uint32_t *dst, const float *cos, const float *sin,
                           int64_t half) {
#pragma GCC ivdep
    for (int64_t j = 0; j < half; ++j) {
        const float a = from_bits(src[j] << 16), b = from_bits(src[j] & 0xFFFF0000u);
        const uint32_t low = bf16_bits(a * cos[j] - b * sin[j]);
        dst[j] = low | (bf16_bits(b * cos[j] + a * sin[j]) << 16);
    }
}

#if defined(__F16C__)
constexpr int64_t kMaxRotDim = 1024;  // fp16 rows are staged in fp32; the caller checks

void widen_fp16(const uint16_t *src, float *dst, int64_t count) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m128i cells = _mm_loadu_si128(reinterpret_cast<const __m128i *>(src + i));
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(cells));
    }
    for (; i < count; ++i) dst[i] = _cvtsh_ss(src[i]);
}

void narrow_fp16(const float *src, uint16_t *dst, int64_t count) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m128i cells = _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(dst + i), cells);
    }
    for (; i < count; ++i) dst[i] = _cvtss_sh(src[i], _MM_FROUND_TO_NEAREST_INT);
}

void turn_fp16(const uint16_t *src, uint16_t *dst, const float *cos, const float *sin,
               int64_t half, bool is_neox) {
    float wide[kMaxRotDim];
    widen_fp16(src, wide, 2 * half);
    if (is_neox) turn_neox<Float32>(wide, wide, cos, sin, half);
    else turn_gptj(wide, wide, cos, sin, half);
    narrow_fp16(wide, dst, 2 * half);
}
#endif

template <class T>
inline void turn_neox_sized(const char *src, char *dst, const float *cos, const float *sin,
                            int64_t half) {
    const auto *from = reinterpret_cast<const typename T::Cell *>(src);
    auto *to = reinterpret_cast<typename T::Cell *>(dst);
    if (half == 32) turn_neox<T>(from, to, cos, sin, 32);  // constant trip counts unroll fully
    else if (half == 64) turn_neox<T>(from, to, cos, sin, 64);
    else turn_neox<T>(from, to, cos, sin, half);
}

void turn_row(const Job &job, const char *src, char *dst, const float *cos, const float *sin) {
    const int64_t half = job.rot_dim / 2;
    if (job.dtype == kBFloat16 && job.is_neox) {
        turn_neox_sized<BFloat16>(src, dst, cos, sin, half);
    } else if (job.dtype == kBFloat16) {
        turn_gptj_bf16(reinterpret_cast<const uint32_t *>(src), reinterpret_cast<uint32_t *>(dst),
                       cos, sin, half);
    } else if (job.dtype == kFloat32 && job.is_neox) {
        turn_neox_sized<Float32>(src, dst, cos, sin, half);
    } else if (job.dtype == kFloat32) {
        turn_gptj(reinterpret_cast<const float *>(src), reinterpret_cast<float *>(dst), cos, sin,
                  half);
    } else {
#if defined(__F16C__)
        turn_fp16(reinterpret_cast<const uint16_t *>(src), reinterpret_cast<uint16_t *>(dst), cos,
                  sin, half, job.is_neox != 0);
#endif
    }
}

char *address(const Layout &at, int64_t layer, int64_t slot, int64_t page_size) {
    char *base = reinterpret_cast<char *>(at.base[layer]);
    if (page_size == 0) return base + slot * at.token_bytes;
    return base + (slot / page_size) * at.page_bytes + (slot % page_size) * at.token_bytes;
}

void copy_rows(const Layout &at, const char *src, char *dst, int64_t count, int64_t num_heads) {
    if (src == dst) return;
    const bool heads_touch = at.head_bytes == at.row_bytes;
    if (heads_touch && at.token_bytes == num_heads * at.row_bytes) {
        std::memcpy(dst, src, size_t(count * at.token_bytes));
        return;
    }
    if (at.token_bytes == at.row_bytes) {  // paged: the tokens of one head touch
        for (int64_t head = 0; head < num_heads; ++head) {
            const int64_t offset = head * at.head_bytes;
            std::memcpy(dst + offset, src + offset, size_t(count * at.row_bytes));
        }
        return;
    }
    for (int64_t token = 0; token < count; ++token) {
        for (int64_t head = 0; head < num_heads; ++head) {
            const int64_t offset = token * at.token_bytes + head * at.head_bytes;
            std::memcpy(dst + offset, src + offset, size_t(at.row_bytes));
        }
    }
}

void turn_rows(const Job &job, const char *src, char *dst, int64_t count, int32_t row) {
    const int64_t cell_bytes = job.dtype == kFloat32 ? 4 : 2;
    const int64_t head_bytes = job.rot_offset * cell_bytes;
    const int64_t tail_start = head_bytes + job.rot_dim * cell_bytes;
    const int64_t tail_bytes = job.k.row_bytes - tail_start;
    const float *cos = job.cos_sin + int64_t(row) * job.rot_dim;
    const float *sin = cos + job.rot_dim / 2;
    for (int64_t token = 0; token < count; ++token) {
        for (int64_t head = 0; head < job.num_heads; ++head) {
            const int64_t offset = token * job.k.token_bytes + head * job.k.head_bytes;
            const char *from = src + offset;
            char *to = dst + offset;
            if (from != to && head_bytes) std::memcpy(to, from, size_t(head_bytes));
            turn_row(job, from + head_bytes, to + head_bytes, cos, sin);
            if (from != to && tail_bytes) {
                std::memcpy(to + tail_start, from + tail_start, size_t(tail_bytes));
            }
        }
    }
}

bool continues(const Job &job, int64_t i) {
    if (job.src[i] != job.src[i - 1] + 1 || job.dst[i] != job.dst[i - 1] + 1) return false;
    if (job.row && job.row[i] != job.row[i - 1]) return false;
    return job.page_size == 0 || (job.src[i] % job.page_size && job.dst[i] % job.page_size);
}

std::vector<Run> runs_of(const Job &job) {
    std::vector<Run> runs;
    for (int64_t i = 0; i < job.num_tokens; ++i) {
        if (i && continues(job, i)) ++runs.back().count;
        else runs.push_back({i, 1});
    }
    return runs;
}

void move_run(const Job &job, int64_t layer, Run run) {
    const int64_t src = job.src[run.start], dst = job.dst[run.start];
    const char *k_from = address(job.k, layer, src, job.page_size);
    char *k_to = address(job.k, layer, dst, job.page_size);
    if (job.row && !job.still[job.row[run.start]]) {
        turn_rows(job, k_from, k_to, run.count, job.row[run.start]);
    } else {
        copy_rows(job.k, k_from, k_to, run.count, job.num_heads);
    }
    if (job.v.base) {
        copy_rows(job.v, address(job.v, layer, src, job.page_size),
                  address(job.v, layer, dst, job.page_size), run.count, job.num_heads);
    }
}

// Work item i is token i % num_tokens of layer i / num_tokens; one thread takes [start, stop).
void move_items(const Job &job, const std::vector<Run> &runs, int64_t start, int64_t stop) {
    while (start < stop) {
        const int64_t layer = start / job.num_tokens, first = start % job.num_tokens;
        const int64_t last = std::min(job.num_tokens, first + stop - start);
        const auto after = [](int64_t token, const Run &run) { return token < run.start; };
        auto run = std::upper_bound(runs.begin(), runs.end(), first, after) - 1;
        for (; run != runs.end() && run->start < last; ++run) {
            const int64_t from = std::max(run->start, first);
            const int64_t to = std::min(run->start + run->count, last);
            move_run(job, layer, {from, to - from});
        }
        start += last - first;
    }
}

}  // namespace

extern "C" {

// 1 where this build rotates the dtype code of Job.
int kvedit_can_rotate(int64_t dtype) {
#if defined(__F16C__)
    return dtype >= kFloat32 && dtype <= kFloat16;
#else
    return dtype == kFloat32 || dtype == kBFloat16;
#endif
}

// Moves the whole job; returns 0, or 1 where memory ran out before anything was written.
int kvedit_relocate(const Job *job) {
    try {
        const std::vector<Run> runs = runs_of(*job);
        const int64_t items = job->num_layers * job->num_tokens;
        const int64_t threads = std::max<int64_t>(1, std::min(job->num_threads, items));
        std::vector<std::thread> helpers;
        helpers.reserve(size_t(threads));
        int64_t start = 0;
        for (int64_t t = 1; t < threads; ++t) {
            const int64_t stop = items * t / threads;
            try {
                helpers.emplace_back(move_items, std::cref(*job), std::cref(runs), start, stop);
            } catch (const std::exception &) {
                break;  // no room for one more thread: this one takes the rest
            }
            start = stop;
        }
        move_items(*job, runs, start, items);
        for (auto &helper : helpers) helper.join();
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

}  // extern "C"
