#include "simd.h"

#include <algorithm>
#include <cmath>

namespace manyclass {

MANYCLASS_SIMD float dot(const float* a, const float* b, int64_t size) {
  float sums[kFeatureBlock] = {};
  for (int64_t block = 0; block < size; block += kFeatureBlock) {
    for (int64_t i = 0; i < kFeatureBlock; ++i) sums[i] += a[block + i] * b[block + i];
  }
  float total = 0;
  for (float sum : sums) total += sum;
  return total;
}

MANYCLASS_SIMD float squared_distance(const float* a, const float* b, int64_t size) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return sum;
}

MANYCLASS_SIMD int64_t outside_unit(const double* values, int64_t count) {
  int64_t outside = 0;
#pragma omp simd reduction(+ : outside)
  for (int64_t i = 0; i < count; ++i) outside += (values[i] >= 0.0) & (values[i] < 1.0) ? 0 : 1;
  return outside;
}

MANYCLASS_SIMD void dots(const float* query, const float* rows, int64_t count, int64_t size, float* out) {
  int64_t row = 0;
  for (; row + 4 <= count; row += 4) {  // four at a time: their sums do not wait for each other
    const float *r0 = rows + row * size, *r1 = r0 + size, *r2 = r1 + size, *r3 = r2 + size;
    float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t i = 0; i < size; ++i) {
      s0 += query[i] * r0[i];
      s1 += query[i] * r1[i];
      s2 += query[i] * r2[i];
      s3 += query[i] * r3[i];
    }
    out[row] = s0, out[row + 1] = s1, out[row + 2] = s2, out[row + 3] = s3;
  }
  for (; row < count; ++row) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += query[i] * rows[row * size + i];
    out[row] = sum;
  }
}

namespace {

// Rows that are prefetched ahead of the one in use.
constexpr int64_t kAhead = 8;

}  // namespace

MANYCLASS_SIMD void dots_at(const float* query, const float* matrix, const int64_t* ids, int64_t count, int64_t size,
                            float* out) {
  for (int64_t j = 0; j < std::min(kAhead, count); ++j) prefetch_row(matrix + ids[j] * size, size);
  for (int64_t j = 0; j < count; ++j) {
    if (j + kAhead < count) prefetch_row(matrix + ids[j + kAhead] * size, size);
    const float* row = matrix + ids[j] * size;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += query[i] * row[i];
    out[j] = sum;
  }
}

MANYCLASS_SIMD void combine_at(const float* matrix, const int64_t* ids, const float* factors, int64_t count,
                               int64_t size, float* out) {
  std::fill(out, out + size, 0.0f);
  for (int64_t j = 0; j < count; ++j) {
    const float factor = factors[j];
    const float* row = matrix + ids[j] * size;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) out[i] += factor * row[i];
  }
}

MANYCLASS_SIMD void sum_rows(const float* rows, int64_t count, int64_t size, float* out) {
  std::copy(rows, rows + size, out);
  for (int64_t row = 1; row < count; ++row) {
    const float* values = rows + row * size;
    for (int64_t i = 0; i < size; ++i) out[i] += values[i];
  }
}

namespace {

// Sixteen numbers that the compiler keeps in one register, or in several where registers are smaller.
typedef float Vector __attribute__((vector_size(64)));
constexpr int64_t kLanes = 16, kWide = 2 * kLanes, kTall = 4;

}  // namespace

MANYCLASS_SIMD void sum_outer_products(const float* rows, int64_t count, int64_t size, float* scratch, float* out) {
  // Rows are first copied to aligned memory and padded with zeros, so that tiles of kTall × kWide products need no
  // remainders. A tile's sums stay in registers while all rows pass by.
  const int64_t stride = (size + kWide - 1) / kWide * kWide;
  for (int64_t row = 0; row < count; ++row) {
    std::copy(rows + row * size, rows + (row + 1) * size, scratch + row * stride);
    std::fill(scratch + row * stride + size, scratch + (row + 1) * stride, 0.0f);
  }
  for (int64_t top = 0; top < size; top += kTall) {
    for (int64_t left = top / kWide * kWide; left < size; left += kWide) {
      Vector sums[kTall][2] = {};
      for (int64_t row = 0; row < count; ++row) {
        const float* values = scratch + row * stride;
        const Vector a = *reinterpret_cast<const Vector*>(values + left);
        const Vector b = *reinterpret_cast<const Vector*>(values + left + kLanes);
#pragma GCC unroll 4
        for (int64_t i = 0; i < kTall; ++i) {
          sums[i][0] += values[top + i] * a;
          sums[i][1] += values[top + i] * b;
        }
      }
      for (int64_t i = top; i < std::min(top + kTall, size); ++i) {
        const auto* tile = reinterpret_cast<const float*>(sums[i - top]);
        // Row i of the triangle starts at column i, after the rows above: i · size − i · (i − 1) / 2 numbers.
        float* line = out + i * size - i * (i - 1) / 2 - i;
        for (int64_t l = std::max(i, left); l < std::min(left + kWide, size); ++l) line[l] = tile[l - left];
      }
    }
  }
}

MANYCLASS_SIMD void subtract_max_columns(float* rows, const float* offsets, int64_t count, int64_t size, float* largest) {
  for (int64_t row = 0; row < count; ++row) {
    float* values = rows + row * size;
    const float offset = offsets[row];
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      values[i] -= offset;
      largest[i] = values[i] > largest[i] ? values[i] : largest[i];
    }
  }
}

MANYCLASS_SIMD float add_row(const float* row, int64_t size, float* out) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) {
    out[i] += row[i];
    sum += row[i] * row[i];
  }
  return sum;
}

MANYCLASS_SIMD float masses(float* values, float* spread, int64_t count, float norm, float log_size, bool absolute) {
  const float limit = std::sqrt(2 * log_size);
  float check = 0;
#pragma omp simd reduction(+ : check)
  for (int64_t i = 0; i < count; ++i) {
    const float mean = absolute ? std::fabs(values[i]) : values[i], variance = norm * spread[i];
    const float deviation = std::sqrt(variance);
    values[i] = mean + (deviation <= limit ? log_size + variance / 2 : deviation * limit);
    check += values[i] * 0.0f;
  }
  return check;
}

namespace {

inline MANYCLASS_SIMD int64_t at_least(const float* values, int64_t count, float bound) {
  int32_t found = 0;
#pragma omp simd reduction(+ : found)
  for (int64_t i = 0; i < count; ++i) found += values[i] >= bound;
  return found;
}

}  // namespace

MANYCLASS_SIMD float largest(const float* values, int64_t count) {
  float result = -INFINITY;
#pragma omp simd reduction(max : result)
  for (int64_t i = 0; i < count; ++i) result = values[i] > result ? values[i] : result;
  return result;
}

MANYCLASS_SIMD float smallest_from(const float* values, int64_t count, float bound) {
  float result = INFINITY;
#pragma omp simd reduction(min : result)
  for (int64_t i = 0; i < count; ++i) {
    const float value = values[i] >= bound ? values[i] : INFINITY;
    result = value < result ? value : result;
  }
  return result;
}

float kth_largest(const float* values, int64_t count, int64_t k) {
  // Bisection of the range: counting is vector code, and ends early where one value alone is the k-th.
  float low = smallest_from(values, count, -3e38f), high = largest(values, count);
  if (at_least(values, count, low) < k) return -INFINITY;
  if (at_least(values, count, high) >= k) return high;
  while (true) {  // at least k values reach `low`, fewer reach `high`
    const float middle = low + (high - low) / 2;
    if (!(middle > low && middle < high)) break;
    const int64_t found = at_least(values, count, middle);
    (found >= k ? low : high) = middle;
    if (found == k) break;
  }
  return smallest_from(values, count, low);
}

MANYCLASS_SIMD void select_best(const float* values, int64_t count, float bound, int64_t k, int32_t* out) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    out[found] = static_cast<int32_t>(i);
    found += values[i] >= bound;
  }
  if (found <= k) return;
  int64_t ties = found - k, kept = 0;  // leave out the last of those that equal the bound
  for (int64_t i = found - 1; i >= 0 && ties > 0; --i) {
    if (values[out[i]] == bound) out[i] = -1, --ties;
  }
  for (int64_t i = 0; i < found; ++i) {
    if (out[i] >= 0) out[kept++] = out[i];
  }
}

namespace {

// Σ min(1, c·e) over those for which that is at least `floor`.
MANYCLASS_SIMD float expected_count(const float* e, const float* floor, int64_t count, float c) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = c * e[i], chance = scaled < 1.0f ? scaled : 1.0f;
    sum += chance >= floor[i] ? chance : 0.0f;
  }
  return sum;
}

}  // namespace

MANYCLASS_SIMD void scale_sums(const int32_t* sums, const float* scales, float scale, int64_t count, float* out) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(sums[i]) * (scales[i] * scale);
}

MANYCLASS_SIMD float finish_outputs(float* values, int64_t count, bool absolute) {
  float check = 0;
#pragma omp simd reduction(+ : check)
  for (int64_t i = 0; i < count; ++i) {
    values[i] = absolute ? std::fabs(values[i]) : values[i];
    check += values[i] * 0.0f;
  }
  return check;
}

MANYCLASS_SIMD void leave_out(const int32_t* ids, int64_t count, int64_t id, float* values) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) values[i] = ids[i] == id ? -INFINITY : values[i];
}

MANYCLASS_SIMD void choose(const float* e, const float* pool, int64_t count, int64_t number, float total, float* chance) {
  const auto wanted = static_cast<float>(number);
  float low = wanted / total, high = low;
  do {
    high *= 4;
  } while (high < 1e36f && expected_count(e, pool, count, high) <= wanted);
  if (high < 1e36f) {
    for (int step = 0; step < 24 && high > low * 1.00001f; ++step) {
      const float middle = std::sqrt(low) * std::sqrt(high);
      (expected_count(e, pool, count, middle) <= wanted ? low : high) = middle;
    }
  } else {
    low = high;
  }
  // The members are now fixed. Solve for c again, so that exactly `number` are drawn.
  int32_t members = 0;
  float rest = 0;
#pragma omp simd reduction(+ : members, rest)
  for (int64_t i = 0; i < count; ++i) {
    const bool belongs = e[i] > 0 && low * e[i] >= pool[i];
    chance[i] = belongs ? e[i] : 0.0f;
    members += belongs;
    rest += chance[i];
  }
  double c = members <= number ? INFINITY : wanted / rest;
  for (bool changed = members > number; changed;) {  // members that become certain raise c for the others
    const auto bound = static_cast<float>(1 / c);
    int32_t certain = 0;
    float open = 0;
#pragma omp simd reduction(+ : certain, open)
    for (int64_t i = 0; i < count; ++i) {
      certain += chance[i] >= bound;
      open += chance[i] >= bound ? 0.0f : chance[i];
    }
    const double larger = open > 0 ? static_cast<double>(number - certain) / open : c;
    changed = larger > c * (1 + 1e-6);
    c = std::max(c, larger);
  }
  const auto scale = static_cast<float>(std::min(c, 3e38));
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = scale * chance[i], certain = chance[i] > 0 ? 1.0f : 0.0f;
    chance[i] = scaled < certain ? scaled : certain;
  }
}

namespace {

// exp(value) for values that are at most 0, −∞ among them. The integer part of NaN is arbitrary, but the result is NaN.
// Excluding NaN would cost a tenth of a loop.
__attribute__((no_sanitize("float-cast-overflow"), always_inline)) inline float exp_of(float value) {
  const float x = value < -88.0f ? -88.0f : value;
  // exp(x) = 2^k · exp(r) with |r| ≤ ln(2)/2, where eight terms of the series are exact to rounding; k = −127 gives 0.
  const auto k = static_cast<int32_t>(x * 1.44269504f - 0.5f);
  const float r = (x - static_cast<float>(k) * 0.693359375f) + static_cast<float>(k) * 2.12194440e-4f;
  float series = 1.0f / 5040;
  series = series * r + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  const uint32_t bits = static_cast<uint32_t>(k + 127) << 23;
  float power;
  __builtin_memcpy(&power, &bits, sizeof power);
  return series * power;
}

}  // namespace

__attribute__((no_sanitize("float-cast-overflow"))) MANYCLASS_SIMD float exp_sum(float* values, int64_t count, float shift) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    values[i] = exp_of(values[i] - shift);
    sum += values[i];
  }
  return sum;
}

__attribute__((no_sanitize("float-cast-overflow"))) MANYCLASS_SIMD void exp_sum_columns(float* rows, int64_t count,
                                                                                        int64_t size, const float* shifts,
                                                                                        float* sums) {
  for (int64_t row = 0; row < count; ++row) {
    float* values = rows + row * size;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      values[i] = exp_of(values[i] - shifts[i]);
      sums[i] += values[i];
    }
  }
}

MANYCLASS_SIMD void update_row(const RowUpdate& update, const float* missed, int64_t size, const float* grad, float* first,
                               float* second, int64_t width, float* weight) {
  const float gain1 = update.gain1, gain2 = update.gain2 * missed[4], rate = update.rate, root = update.root;
  const float eps = update.eps;
  const float scale = missed[0], move = missed[1], decay1 = missed[2], decay2 = missed[3];
  const bool full = second && width == size;
  if (first && move != 0 && full) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) weight[i] -= move * first[i] / (std::sqrt(second[i]) * root + eps);
  } else if (first && move != 0) {
    const float factor = second ? move / (std::sqrt(*second) * root + eps) : move;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) weight[i] -= factor * first[i];
  }
  if (first) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) first[i] = decay1 * first[i] + gain1 * grad[i];
  }
  const float* step = first ? first : grad;
  const float least = first ? 0.0f : 1.0f;
  if (full) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      const float square = grad[i] * grad[i], bound = least * square;
      second[i] = decay2 * second[i] + gain2 * square;
      weight[i] = scale * weight[i] - rate * step[i] / (std::sqrt(second[i] > bound ? second[i] : bound) * root + eps);
    }
    return;
  }
  float factor = rate;
  if (second) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += grad[i] * grad[i];
    const float square = sum / static_cast<float>(size), bound = least * square;
    *second = decay2 * *second + gain2 * square;
    factor /= std::sqrt(*second > bound ? *second : bound) * root + eps;
  }
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) weight[i] = scale * weight[i] - factor * step[i];
}

MANYCLASS_SIMD void add_squared_shares(float* values, int64_t count, float cutoff, float total, float* sums) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float part = 2 * ((values[i] > cutoff ? cutoff : values[i]) - total);
    values[i] = part > 0.0f ? 0.0f : part;
  }
  exp_sum(values, count, 0.0f);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) sums[i] += values[i];
}

}  // namespace manyclass
