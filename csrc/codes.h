// Vectors in 8 bits per number, with one scale per vector: value = code · scale.
#pragma once

#include <cstdint>

namespace manyclass {

// Codes are padded with zeros to a multiple of this.
constexpr int64_t kCodeBlock = 32;

inline int64_t code_stride(int64_t columns) { return (columns + kCodeBlock - 1) / kCodeBlock * kCodeBlock; }

// Writes the codes of a row and returns its scale: 0 for a row of zeros, NaN for one that is not finite.
float encode_row(const float* row, int64_t columns, int8_t* out);

// The same for a query, in 16 bits, or in as many as 32-bit sums of products allow.
float encode_query(const float* query, int64_t columns, int16_t* out);

// out += factor · value for the vector of these codes; returns the vector's squared length.
float add_code(const int8_t* code, int64_t columns, float scale, float factor, float* out);

// out[j] = Σ_i query[i] · codes[ids[j]][i]: exact sums of integers. `stride` is a multiple of kCodeBlock.
void code_dots_at(const int16_t* query, const int8_t* codes, const int32_t* ids, int64_t count, int64_t stride, int32_t* out);

}  // namespace manyclass
