// The inner loops. Each is compiled for several instruction sets; the loader picks the best that the machine has.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__)
#define MANYCLASS_X86
#define MANYCLASS_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MANYCLASS_SIMD
#endif

namespace manyclass {

// Prefetches `size` numbers.
inline void prefetch_row(const float* row, int64_t size) {
  for (int64_t i = 0; i < size; i += 16) __builtin_prefetch(row + i);
}

// Vectors of features are padded with zeros to a multiple of this: no remainders, and enough independent sums to keep
// the multipliers busy.
constexpr int64_t kFeatureBlock = 64;

// ⟨a, b⟩ for a size that is a multiple of kFeatureBlock.
float dot(const float* a, const float* b, int64_t size);

// ‖a − b‖².
float squared_distance(const float* a, const float* b, int64_t size);

// How many of the values are not in [0, 1).
int64_t outside_unit(const double* values, int64_t count);

// out[j] = ⟨query, rows[j]⟩ for `count` rows of `size` columns that are contiguous.
void dots(const float* query, const float* rows, int64_t count, int64_t size, float* out);

// The same for rows at ids[0], ids[1], … of a large matrix, which are fetched ahead of their use.
void dots_at(const float* query, const float* matrix, const int64_t* ids, int64_t count, int64_t size, float* out);

// out = Σ_j factors[j] · matrix[ids[j]].
void combine_at(const float* matrix, const int64_t* ids, const float* factors, int64_t count, int64_t size, float* out);

// out[i] = Σ_c rows[c][i] over `count` rows that are contiguous.
void sum_rows(const float* rows, int64_t count, int64_t size, float* out);

// out[(i, l)] = Σ_c rows[c][i] · rows[c][l] for i ≤ l, row by row of the upper triangle: size · (size + 1) / 2 numbers.
// `scratch`, aligned to 64 bytes, holds count × size numbers with size rounded up to a multiple of 32.
void sum_outer_products(const float* rows, int64_t count, int64_t size, float* scratch, float* out);

// Subtracts offsets[j] from row j of `count` rows, and raises largest[i] to the largest number of column i.
void subtract_max_columns(float* rows, const float* offsets, int64_t count, int64_t size, float* largest);

// out += row; returns ‖row‖².
float add_row(const float* row, int64_t size, float* out);

// Log-masses of nodes whose logits have the means in `values`, in place, and the variances `norm · spread`: those of
// exp(log_size) Gaussian logits, or of their largest if the spread is so large that it dominates (the random energy model).
// `spread` is overwritten. Returns 0, or NaN if a mean or a variance is not finite.
float masses(float* values, float* spread, int64_t count, float norm, float log_size, bool absolute);

float largest(const float* values, int64_t count);

// The smallest of the values that are at least `bound`; +∞ if there are none.
float smallest_from(const float* values, int64_t count, float bound);

// The k-th largest of `count` ≥ k ≥ 1 values.
float kth_largest(const float* values, int64_t count, int64_t k);

// The places of the k values that reach `bound`, the k-th largest, ascending; of those that equal it the first. `out` holds `count`.
void select_best(const float* values, int64_t count, float bound, int64_t k, int32_t* out);

// out[i] = sums[i] · scales[i] · scale.
void scale_sums(const int32_t* sums, const float* scales, float scale, int64_t count, float* out);

// Takes absolute values if `absolute` is set; returns 0, or NaN if one is not finite.
float finish_outputs(float* values, int64_t count, bool absolute);

// values[i] = −∞ where ids[i] is `id`.
void leave_out(const int32_t* ids, int64_t count, int64_t id, float* values);

// Chances of candidates to be drawn, min(1, c·e), where `number` are drawn of those for which that is at least the
// chance to come with the pool. `e` holds exp(output) up to a factor, `total` is their sum. Writes the chances, 0 for what is left to
// the pool.
void choose(const float* e, const float* pool, int64_t count, int64_t number, float total, float* chance);

// How an optimiser changes rows; see update_rows_.
struct RowUpdate {
  float gain1, gain2, rate, root, eps;
};

// One row of update_rows_: `first` and `second`, which has `width` numbers, may be null.
void update_row(const RowUpdate& update, const float* missed, int64_t size, const float* grad, float* first, float* second,
                int64_t width, float* weight);

// values[i] = exp(values[i] − shift) for values that are at most `shift`, −∞ among them; returns their sum.
float exp_sum(float* values, int64_t count, float shift);

// The same for `count` rows with a shift for each column; adds to sums[i] the sum of column i.
void exp_sum_columns(float* rows, int64_t count, int64_t size, const float* shifts, float* sums);

// sums[i] += exp(2·(min(values[i], cutoff) − total)), at most 1 each. `values` is overwritten.
void add_squared_shares(float* values, int64_t count, float cutoff, float total, float* sums);

}  // namespace manyclass
