// Summaries of blocks of classes: mean, scaled principal directions, and what is left of the variance.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <vector>

#include "check.h"
#include "simd.h"

namespace {

using namespace manyclass;

float inner(const float* a, const float* b, int64_t size) { return std::inner_product(a, a + size, b, 0.0f); }

// Gram-Schmidt on `rank` vectors that lie one after the other; one that vanishes stays zero.
void orthonormalise(float* vectors, int64_t rank, int64_t size) {
  for (int64_t r = 0; r < rank; ++r) {
    float* vector = vectors + r * size;
    for (int64_t other = 0; other < 2 * r; ++other) {  // each twice: the second time removes what rounding left
      const float* axis = vectors + (other % r) * size;
      const float along = inner(vector, axis, size);
      for (int64_t i = 0; i < size; ++i) vector[i] -= along * axis[i];
    }
    const float norm = std::sqrt(inner(vector, vector, size));
    for (int64_t i = 0; i < size; ++i) vector[i] = norm > 1e-20f ? vector[i] / norm : 0.0f;
  }
}

// L with L·Lᵀ = matrix, in place, lower triangle.
void cholesky(double* matrix, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      double sum = matrix[i * size + j];
      for (int64_t k = 0; k < j; ++k) sum -= matrix[i * size + k] * matrix[j * size + k];
      matrix[i * size + j] = i == j ? std::sqrt(std::max(sum, 1e-30)) : sum / matrix[j * size + j];
    }
  }
}

// mean: (num_blocks, columns)   directions: (num_blocks, rank, columns)   spread: (num_blocks,): written for `blocks`
// farthest, reach: (num_blocks,): the class with the longest row, and the square of its length: written, too
// weight: (num_classes, width)   bias: (num_classes,) or (0,), then columns = width + 1   order: (num_classes,)
// Directions come from `iterations` of subspace iteration that starts at the old ones.
void summarise_(const Tensor& mean, const Tensor& directions, const Tensor& spread, const Tensor& farthest,
                const Tensor& reach, const Tensor& weight, const Tensor& bias, const Tensor& order,
                const Tensor& blocks, int64_t iterations) {
  const char* op = "summarise_";
  check(mean, ScalarType::Float, 2, op, "mean");
  check(directions, ScalarType::Float, 3, op, "directions");
  check(spread, ScalarType::Float, 1, op, "spread");
  check(farthest, ScalarType::Long, 1, op, "farthest");
  check(reach, ScalarType::Float, 1, op, "reach");
  check(weight, ScalarType::Float, 2, op, "weight");
  check(bias, ScalarType::Float, 1, op, "bias");
  check(order, ScalarType::Long, 1, op, "order");
  check(blocks, ScalarType::Long, 1, op, "blocks");
  const int64_t classes = weight.size(0), width = weight.size(1), all = mean.size(0), columns = mean.size(1);
  const int64_t rank = directions.size(1);
  const bool offsets = bias.numel() > 0;
  STD_TORCH_CHECK(columns == width + offsets && (!offsets || bias.numel() == classes), op, ": mean must fit the weights");
  STD_TORCH_CHECK(directions.size(0) == all && directions.size(2) == columns && spread.numel() == all &&
                      farthest.numel() == all && reach.numel() == all,
                  op, ": mean, directions, spread, farthest and reach differ");
  STD_TORCH_CHECK(order.numel() == classes && all <= classes, op, ": order must name every class once");
  const auto* order_data = order.const_data_ptr<int64_t>();
  const auto* block_data = blocks.const_data_ptr<int64_t>();
  const auto within = [](const int64_t* data, int64_t count, int64_t limit) {
    return std::all_of(data, data + count, [&](int64_t id) { return 0 <= id && id < limit; });
  };
  STD_TORCH_CHECK(within(block_data, blocks.numel(), all), op, ": blocks out of range");
  const auto* weight_data = weight.const_data_ptr<float>();
  const auto* bias_data = offsets ? bias.const_data_ptr<float>() : nullptr;
  auto* mean_data = mean.mutable_data_ptr<float>();
  auto* direction_data = directions.mutable_data_ptr<float>();
  auto* spread_data = spread.mutable_data_ptr<float>();
  auto* farthest_data = farthest.mutable_data_ptr<int64_t>();
  auto* reach_data = reach.mutable_data_ptr<float>();
  const int64_t largest = (classes + all - 1) / all;

  std::atomic<bool> sound{true};  // exceptions must not leave a thread
  torch::stable::parallel_for(0, blocks.numel(), 16, [&](int64_t begin, int64_t end) {
    std::vector<float> members(largest * columns), basis(rank * columns), along(rank * largest), ones(largest, 1.0f);
    std::vector<double> covariance(rank * rank);
    std::vector<int64_t> rows(largest);
    std::iota(rows.begin(), rows.end(), 0);
    for (int64_t at = begin; at < end; ++at) {
      const int64_t block = block_data[at];
      const int64_t first = block * classes / all, size = (block + 1) * classes / all - first;
      if (!within(order_data + first, size, classes)) {
        sound = false;
        continue;
      }
      reach_data[block] = -1;
      for (int64_t j = 0; j < size; ++j) {
        const int64_t id = order_data[first + j];
        if (j + 4 < size) __builtin_prefetch(weight_data + order_data[first + j + 4] * width);
        std::copy(weight_data + id * width, weight_data + (id + 1) * width, members.data() + j * columns);
        if (offsets) members[j * columns + width] = bias_data[id];
        const float length = inner(members.data() + j * columns, members.data() + j * columns, columns);
        if (length > reach_data[block]) {
          reach_data[block] = length;
          farthest_data[block] = id;
        }
      }
      float* centre = mean_data + block * columns;
      combine_at(members.data(), rows.data(), ones.data(), size, columns, centre);
      for (int64_t i = 0; i < columns; ++i) centre[i] /= static_cast<float>(size);
      const float scale = 1 / std::sqrt(static_cast<float>(size));
      double variance = 0;
      for (int64_t j = 0; j < size; ++j) {
        float* member = members.data() + j * columns;
        for (int64_t i = 0; i < columns; ++i) member[i] = (member[i] - centre[i]) * scale;
        variance += inner(member, member, columns);
      }
      if (rank > 0) {
        float* old = direction_data + block * rank * columns;
        std::copy(old, old + rank * columns, basis.begin());
        if (!(inner(old, old, rank * columns) > 0)) {  // none yet: start from the members
          std::fill(basis.begin(), basis.end(), 0.0f);
          std::copy(members.begin(), members.begin() + std::min(rank, size) * columns, basis.begin());
        }
        const auto project = [&] {
          for (int64_t r = 0; r < rank; ++r) {
            dots(basis.data() + r * columns, members.data(), size, columns, along.data() + r * largest);
          }
        };
        for (int64_t iteration = 0; iteration < iterations; ++iteration) {
          project();
          for (int64_t r = 0; r < rank; ++r) {
            const float* factors = along.data() + r * largest;
            combine_at(members.data(), rows.data(), factors, size, columns, basis.data() + r * columns);
          }
          orthonormalise(basis.data(), rank, columns);
        }
        project();
        double explained = 0;
        for (int64_t r = 0; r < rank; ++r) {
          for (int64_t s = 0; s <= r; ++s) {
            covariance[r * rank + s] = inner(along.data() + r * largest, along.data() + s * largest, size);
          }
          explained += covariance[r * rank + r];
        }
        variance -= explained;
        for (int64_t r = 0; r < rank; ++r) covariance[r * rank + r] += 1e-6 * explained + 1e-20;
        cholesky(covariance.data(), rank);
        std::fill(old, old + rank * columns, 0.0f);
        for (int64_t r = 0; r < rank; ++r) {  // direction r is column r of basis · L
          for (int64_t s = r; s < rank; ++s) {
            const auto factor = static_cast<float>(covariance[s * rank + r]);
            for (int64_t i = 0; i < columns; ++i) old[r * columns + i] += factor * basis[s * columns + i];
          }
        }
      }
      spread_data[block] = static_cast<float>(std::max(variance, 0.0) / static_cast<double>(columns));
    }
  });
  STD_TORCH_CHECK(sound, op, ": order must hold classes in [0, ", classes, ")");
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(manyclass, library) {
  library.def(
      "summarise_(Tensor(a!) mean, Tensor(b!) directions, Tensor(c!) spread, Tensor(d!) farthest, Tensor(e!) reach, "
      "Tensor weight, Tensor bias, Tensor order, Tensor blocks, int iterations) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(manyclass, CPU, library) { library.impl("summarise_", TORCH_BOX(&summarise_)); }
