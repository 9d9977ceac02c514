// Draws from alias tables (Walker 1977), many tables side by side in one pair of arrays.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "check.h"

namespace {

using namespace manyclass;

// threshold, alias: (cells,)   start, length: (batch,)   uniform: (batch, draws) in [0, 1)   ->  cells (batch, draws)
// Row b draws from the table in cells [start[b], start[b] + length[b]): one multiplication picks a cell, its
// fractional part decides between the cell and its alias.
Tensor alias_draw(const Tensor& threshold, const Tensor& alias, const Tensor& start, const Tensor& length,
                  const Tensor& uniform) {
  check(threshold, ScalarType::Double, 1, "alias_draw", "threshold");
  check(alias, ScalarType::Long, 1, "alias_draw", "alias");
  check(start, ScalarType::Long, 1, "alias_draw", "start");
  check(length, ScalarType::Long, 1, "alias_draw", "length");
  check(uniform, ScalarType::Double, 2, "alias_draw", "uniform");
  const int64_t batch = uniform.size(0), draws = uniform.size(1), cells = threshold.numel();
  require(alias.numel() == cells, "alias_draw: threshold and alias must have the same length");
  require(start.numel() == batch && length.numel() == batch,
          "alias_draw: start and length must have one entry per row of uniform");
  check_uniform(uniform, "alias_draw");

  Tensor result = torch::stable::new_empty(uniform, {batch, draws}, ScalarType::Long);
  const auto* threshold_data = threshold.const_data_ptr<double>();
  const auto* alias_data = alias.const_data_ptr<int64_t>();
  const auto* start_data = start.const_data_ptr<int64_t>();
  const auto* length_data = length.const_data_ptr<int64_t>();
  const auto* uniform_data = uniform.const_data_ptr<double>();
  auto* result_data = result.mutable_data_ptr<int64_t>();
  for (int64_t row = 0; row < batch; ++row) {
    require(start_data[row] >= 0 && length_data[row] >= 1 && start_data[row] <= cells - length_data[row],
            "alias_draw: start and length must name cells of the table, of which there are ", cells, "; row ", row,
            " does not");
  }

  const int64_t grain = std::max<int64_t>(1, 4096 / std::max<int64_t>(1, draws));
  torch::stable::parallel_for(0, batch, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t first = start_data[row], size = length_data[row];
      for (int64_t draw = row * draws; draw < (row + 1) * draws; ++draw) {
        const double scaled = uniform_data[draw] * static_cast<double>(size);
        const int64_t column = std::min<int64_t>(static_cast<int64_t>(scaled), size - 1);
        const int64_t cell = first + column;
        const bool keep = scaled - static_cast<double>(column) < threshold_data[cell];
        result_data[draw] = keep ? cell : alias_data[cell];
      }
    }
  });
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(manyclass, library) {
  library.def("alias_draw(Tensor threshold, Tensor alias, Tensor start, Tensor length, Tensor uniform) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(manyclass, CPU, library) { library.impl("alias_draw", TORCH_BOX(&alias_draw)); }
