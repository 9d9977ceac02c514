#include "codes.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

#ifdef MANYCLASS_X86
#include <immintrin.h>
#endif

namespace manyclass {

namespace {

// Rows whose largest number is below this count as zero: the quotient by it would overflow.
constexpr float kTiny = 1e-30f;

// Writes round(row · largest code / largest number), padded with zeros; returns the scale.
template <class Code>
inline __attribute__((always_inline)) float encode(const float* row, int64_t columns, float most, Code* out) {
  const int64_t stride = code_stride(columns);
  float largest = 0, check = 0;
#pragma omp simd reduction(max : largest) reduction(+ : check)
  for (int64_t i = 0; i < columns; ++i) {
    const float size = std::fabs(row[i]);
    largest = size > largest ? size : largest;
    check += row[i] * 0.0f;
  }
  if (check != 0 || largest < kTiny) {
    std::fill(out, out + stride, Code{0});
    return check != 0 ? NAN : 0.0f;
  }
  const float factor = most / largest;
  constexpr float kRound = 12582912.0f;  // 1.5 · 2²³: adding it leaves no bits for the fraction, and rounds half to even
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) out[i] = static_cast<Code>(static_cast<int32_t>((row[i] * factor + kRound) - kRound));
  std::fill(out + columns, out + stride, Code{0});
  return largest / most;
}

// Rows that are prefetched ahead of the ones in use.
constexpr int64_t kAhead = 24;

inline void prefetch(const int8_t* codes, int64_t stride) {
  for (int64_t i = 0; i < stride; i += 64) __builtin_prefetch(codes + i);
}

#ifdef MANYCLASS_X86
__attribute__((target("avx2"))) inline __m256i widened(const int8_t* codes) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
}

__attribute__((target("avx2"))) void code_dots_avx2(const int16_t* query, const int8_t* codes, const int32_t* ids,
                                                    int64_t count, int64_t stride, int32_t* out) {
  for (int64_t j = 0; j < std::min(kAhead, count); ++j) prefetch(codes + ids[j] * stride, stride);
  for (int64_t j = 0; j < count; j += 4) {
    const int64_t some = std::min<int64_t>(4, count - j);
    for (int64_t ahead = j + kAhead; ahead < std::min(j + kAhead + 4, count); ++ahead) {
      prefetch(codes + ids[ahead] * stride, stride);
    }
    // The last few rows are filled up with the first of them.
    const int8_t *r0 = codes + ids[j] * stride, *r1 = some > 1 ? codes + ids[j + 1] * stride : r0;
    const int8_t *r2 = some > 2 ? codes + ids[j + 2] * stride : r0, *r3 = some > 3 ? codes + ids[j + 3] * stride : r0;
    __m256i s0 = _mm256_setzero_si256(), s1 = s0, s2 = s0, s3 = s0;
    for (int64_t i = 0; i < stride; i += 16) {
      const __m256i part = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(query + i));
      s0 = _mm256_add_epi32(s0, _mm256_madd_epi16(part, widened(r0 + i)));
      s1 = _mm256_add_epi32(s1, _mm256_madd_epi16(part, widened(r1 + i)));
      s2 = _mm256_add_epi32(s2, _mm256_madd_epi16(part, widened(r2 + i)));
      s3 = _mm256_add_epi32(s3, _mm256_madd_epi16(part, widened(r3 + i)));
    }
    const __m256i pairs = _mm256_hadd_epi32(_mm256_hadd_epi32(s0, s1), _mm256_hadd_epi32(s2, s3));
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    if (some == 4) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + j), four);
    } else {
      int32_t last[4];
      _mm_storeu_si128(reinterpret_cast<__m128i*>(last), four);
      std::copy_n(last, some, out + j);
    }
  }
}
#endif

void code_dots_plain(const int16_t* query, const int8_t* codes, const int32_t* ids, int64_t count, int64_t stride,
                     int32_t* out) {
  for (int64_t j = 0; j < count; ++j) {
    const int8_t* row = codes + ids[j] * stride;
    int32_t sum = 0;
    for (int64_t i = 0; i < stride; ++i) sum += query[i] * row[i];
    out[j] = sum;
  }
}

}  // namespace

MANYCLASS_SIMD float encode_row(const float* row, int64_t columns, int8_t* out) { return encode(row, columns, 127.0f, out); }

MANYCLASS_SIMD float encode_query(const float* query, int64_t columns, int16_t* out) {
  const int64_t most = std::numeric_limits<int32_t>::max() / (127 * code_stride(columns));
  return encode(query, columns, static_cast<float>(std::min<int64_t>(most, 32767)), out);
}

MANYCLASS_SIMD float add_code(const int8_t* code, int64_t columns, float scale, float factor, float* out) {
  float length = 0;
#pragma omp simd reduction(+ : length)
  for (int64_t i = 0; i < columns; ++i) {
    const float value = static_cast<float>(code[i]) * scale;
    out[i] += factor * value;
    length += value * value;
  }
  return length;
}

void code_dots_at(const int16_t* query, const int8_t* codes, const int32_t* ids, int64_t count, int64_t stride,
                  int32_t* out) {
#ifdef MANYCLASS_X86
  static const bool avx2 = __builtin_cpu_supports("avx2");
  if (avx2) return code_dots_avx2(query, codes, ids, count, stride, out);
#endif
  code_dots_plain(query, codes, ids, count, stride, out);
}

}  // namespace manyclass
