// Balanced bisection: classes into blocks of equal size whose members lie close together.
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

// Rows that the direction of a split is found from; more would not change it much.
constexpr int64_t kSample = 1024;
constexpr int kPowerIterations = 4;

struct Projected {
  float value;
  int64_t id;
  bool operator<(const Projected& other) const { return value < other.value || (value == other.value && id < other.id); }
};

// The principal direction of the rows at `sample`, by power iteration.
void principal_direction(const float* weight, const std::vector<int64_t>& sample, int64_t columns, float* direction) {
  const auto count = static_cast<int64_t>(sample.size());
  std::vector<float> mean(columns), next(columns), values(count), ones(count, 1.0f / static_cast<float>(count));
  combine_at(weight, sample.data(), ones.data(), count, columns, mean.data());
  // Start from the row that is farthest from the mean.
  float farthest = -1;
  for (int64_t id : sample) {
    const float distance = squared_distance(weight + id * columns, mean.data(), columns);
    if (distance > farthest) {
      farthest = distance;
      for (int64_t i = 0; i < columns; ++i) direction[i] = weight[id * columns + i] - mean[i];
    }
  }
  for (int iteration = 0; iteration < kPowerIterations; ++iteration) {
    float norm = 0, offset = 0, total = 0;
    for (int64_t i = 0; i < columns; ++i) norm += direction[i] * direction[i];
    if (!(norm > 0)) return;
    for (int64_t i = 0; i < columns; ++i) direction[i] /= std::sqrt(norm), offset += direction[i] * mean[i];
    dots_at(direction, weight, sample.data(), count, columns, values.data());
    for (float& value : values) value -= offset, total += value;
    combine_at(weight, sample.data(), values.data(), count, columns, next.data());
    for (int64_t i = 0; i < columns; ++i) direction[i] = next[i] - total * mean[i];
  }
}

// weight: (num_classes, columns)  ->  order (num_classes,): classes by block. After `levels` bisections block j holds the
// positions [⌊j·n/2^levels⌋, ⌊(j + 1)·n/2^levels⌋). Segments are halved along their principal direction; with `outliers_first` the
// first one by the distance from the mean of all rows.
Tensor bisect(const Tensor& weight, int64_t levels, bool outliers_first) {
  check(weight, ScalarType::Float, 2, "bisect", "weight");
  const int64_t classes = weight.size(0), columns = weight.size(1);
  STD_TORCH_CHECK(levels >= 0 && levels < 40 && (int64_t{1} << levels) <= std::max<int64_t>(1, classes),
                  "bisect: levels must leave a class for each block, got ", levels);
  const auto* data = weight.const_data_ptr<float>();
  Tensor order = torch::stable::new_empty(weight, {classes}, ScalarType::Long);
  auto* ids = order.mutable_data_ptr<int64_t>();
  std::iota(ids, ids + classes, 0);
  std::vector<float> centre(columns);
  sum_rows(data, classes, columns, centre.data());
  for (float& value : centre) value /= static_cast<float>(classes);
  const auto border = [&](int64_t j, int64_t parts) { return static_cast<int64_t>(static_cast<__int128>(j) * classes / parts); };
  for (int64_t level = 0; level < levels; ++level) {
    const int64_t segments = int64_t{1} << level;
    torch::stable::parallel_for(0, segments, 1, [&](int64_t from, int64_t to) {
      std::vector<int64_t> sample;
      std::vector<float> direction(columns), values;
      std::vector<Projected> projected;
      for (int64_t segment = from; segment < to; ++segment) {
        const int64_t begin = border(segment, segments), end = border(segment + 1, segments);
        const int64_t middle = border(2 * segment + 1, 2 * segments), size = end - begin;
        values.resize(size);
        projected.resize(size);
        if (segment == 0 && outliers_first) {
          for (int64_t i = 0; i < size; ++i) values[i] = -squared_distance(data + ids[i] * columns, centre.data(), columns);
        } else {
          sample.clear();
          const int64_t stride = std::max<int64_t>(1, size / kSample);
          for (int64_t i = begin; i < end; i += stride) sample.push_back(ids[i]);
          principal_direction(data, sample, columns, direction.data());
          dots_at(direction.data(), data, ids + begin, size, columns, values.data());
        }
        // Weights that are not finite are refused when classes are drawn; until then they must not break the order.
        for (int64_t i = 0; i < size; ++i) projected[i] = {std::isfinite(values[i]) ? values[i] : 0.0f, ids[begin + i]};
        std::nth_element(projected.begin(), projected.begin() + (middle - begin), projected.end());
        for (int64_t i = 0; i < size; ++i) ids[begin + i] = projected[i].id;
      }
    });
  }
  // Within a block the order is that of the ids: rows of one block are read in the order of memory.
  const int64_t blocks = int64_t{1} << levels;
  torch::stable::parallel_for(0, blocks, 64, [&](int64_t from, int64_t to) {
    for (int64_t j = from; j < to; ++j) std::sort(ids + border(j, blocks), ids + border(j + 1, blocks));
  });
  return order;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(manyclass, library) { library.def("bisect(Tensor weight, int levels, bool outliers_first) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(manyclass, CPU, library) { library.impl("bisect", TORCH_BOX(&bisect)); }
