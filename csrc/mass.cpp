// Estimated log-masses of blocks: each example looks into a few groups of neighbouring blocks.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "check.h"
#include "simd.h"

namespace {

using namespace manyclass;

// query: (batch, columns)   groups: (batch, k), of `group` blocks each   mean: (blocks, columns)
// directions: (blocks, rank, columns)   spread: (blocks,)
// -> log-mass per class of the blocks of the groups, (batch, k, group)
Tensor block_masses(const Tensor& query, const Tensor& groups, const Tensor& mean, const Tensor& directions,
                    const Tensor& spread, int64_t group, bool absolute) {
  const char* op = "block_masses";
  check(query, ScalarType::Float, 2, op, "query");
  check(groups, ScalarType::Long, 2, op, "groups");
  check(mean, ScalarType::Float, 2, op, "mean");
  check(directions, ScalarType::Float, 3, op, "directions");
  check(spread, ScalarType::Float, 1, op, "spread");
  const int64_t batch = query.size(0), columns = query.size(1), k = groups.size(1), blocks = mean.size(0);
  const int64_t rank = directions.size(1);
  STD_TORCH_CHECK(groups.size(0) == batch, op, ": query and groups differ in the batch");
  STD_TORCH_CHECK(mean.size(1) == columns && directions.size(0) == blocks && directions.size(2) == columns &&
                      spread.numel() == blocks,
                  op, ": mean, directions and spread must fit the query and each other");
  STD_TORCH_CHECK(group > 0 && blocks % group == 0, op, ": group must divide the number of blocks, got ", group);
  const auto* wanted = groups.const_data_ptr<int64_t>();
  const int64_t all = blocks / group, pairs = batch * k;
  STD_TORCH_CHECK(std::all_of(wanted, wanted + pairs, [&](int64_t id) { return 0 <= id && id < all; }), op,
                  ": groups must be in [0, ", all, ")");

  // Pairs of an example and a group, by group: its summaries are then read from memory once.
  std::vector<int64_t> order(pairs);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return wanted[a] < wanted[b] || (wanted[a] == wanted[b] && a < b);
  });
  Tensor result = torch::stable::new_empty(query, {batch, k, group});
  const auto* query_data = query.const_data_ptr<float>();
  const auto* mean_data = mean.const_data_ptr<float>();
  const auto* direction_data = directions.const_data_ptr<float>();
  const auto* spread_data = spread.const_data_ptr<float>();
  auto* result_data = result.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, pairs, 32, [&](int64_t begin, int64_t end) {
    std::vector<float> along(group * rank);
    for (int64_t at = begin; at < end; ++at) {
      const int64_t pair = order[at], first = wanted[pair] * group;
      const float* example = query_data + pair / k * columns;
      float* out = result_data + pair * group;
      float norm = 0;
      dots(example, example, 1, columns, &norm);
      dots(example, mean_data + first * columns, group, columns, out);
      dots(example, direction_data + first * rank * columns, group * rank, columns, along.data());
      for (int64_t j = 0; j < group; ++j) {
        float square = norm * spread_data[first + j];
        for (int64_t r = 0; r < rank; ++r) square += along[j * rank + r] * along[j * rank + r];
        if (absolute) out[j] = std::fabs(out[j]) + std::log1p(std::exp(-2 * std::fabs(out[j])));
        out[j] += square / 2;
      }
    }
  });
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(manyclass, library) {
  library.def(
      "block_masses(Tensor query, Tensor groups, Tensor mean, Tensor directions, Tensor spread, int group, "
      "bool absolute) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(manyclass, CPU, library) { library.impl("block_masses", TORCH_BOX(&block_masses)); }
