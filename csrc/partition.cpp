// Balanced bisection: divide rows into blocks of given sizes whose members are close together.
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

// Rows that estimate the direction of a split. More would hardly change it.
constexpr int64_t kSample = 512;
constexpr int kPowerIterations = 3, kMeansIterations = 4;

struct Projected {
  float value;
  int64_t id;
  bool operator<(const Projected& other) const { return value < other.value || (value == other.value && id < other.id); }
};

// The direction that separates the rows at `sample` best: their principal direction by power iteration, then a few steps of
// 2-means with halves of equal size.
struct Splitter {
  const float* rows;
  int64_t columns;
  std::vector<float> mean, direction, next, values, sorted;

  Splitter(const float* rows_, int64_t columns_)
      : rows(rows_), columns(columns_), mean(columns_), direction(columns_), next(columns_) {}

  // Divides by the largest number, so that no square leaves the range of float32. False for zeros and infinity.
  static bool shrink(std::vector<float>& numbers) {
    float largest = 0;
    for (const float number : numbers) largest = std::max(largest, std::fabs(number));
    if (!(largest > 0 && largest < INFINITY)) return false;
    for (float& number : numbers) number /= largest;
    return true;
  }

  bool normalise() {
    if (!shrink(direction)) return false;
    float norm = 0;
    for (const float value : direction) norm += value * value;
    if (!(norm > 0)) return false;
    for (float& value : direction) value /= std::sqrt(norm);
    return true;
  }

  // direction ← Σ factor·(row − mean)
  void combine(const std::vector<int64_t>& sample, float total) {
    combine_at(rows, sample.data(), values.data(), static_cast<int64_t>(sample.size()), columns, next.data());
    for (int64_t i = 0; i < columns; ++i) direction[i] = next[i] - total * mean[i];
  }

  void find(const std::vector<int64_t>& sample) {
    const auto count = static_cast<int64_t>(sample.size());
    values.assign(count, 1.0f / static_cast<float>(count));
    combine_at(rows, sample.data(), values.data(), count, columns, mean.data());
    float farthest = -1;  // start from the row that is farthest from the mean
    for (const int64_t id : sample) {
      const float distance = squared_distance(rows + id * columns, mean.data(), columns);
      if (distance > farthest) {
        farthest = distance;
        for (int64_t i = 0; i < columns; ++i) direction[i] = rows[id * columns + i] - mean[i];
      }
    }
    for (int iteration = 0; iteration < kPowerIterations + kMeansIterations; ++iteration) {
      if (!normalise()) return;
      dots_at(direction.data(), rows, sample.data(), count, columns, values.data());
      float total = 0;
      if (iteration < kPowerIterations) {
        const float offset = std::inner_product(direction.begin(), direction.end(), mean.begin(), 0.0f);
        for (float& value : values) value -= offset;
        shrink(values);
        total = std::accumulate(values.begin(), values.end(), 0.0f);
      } else {
        // NaN cannot be ordered: std::nth_element would read beyond the array.
        for (float& value : values) value = std::isfinite(value) ? value : 0.0f;
        sorted = values;
        std::nth_element(sorted.begin(), sorted.begin() + count / 2, sorted.end());
        const float median = sorted[count / 2];
        for (float& value : values) value = value < median ? -1.0f : 1.0f, total += value;
      }
      combine(sample, total);
    }
    normalise();
  }
};

// rows: (n, columns)   borders: (2^levels + 1,), from 0 to n, rising  ->  order (n,): after `levels` bisections block j holds the
// rows at positions borders[j] … borders[j + 1] − 1, in the order of their numbers
Tensor bisect(const Tensor& rows, const Tensor& borders) {
  check(rows, ScalarType::Float, 2, "bisect", "rows");
  check(borders, ScalarType::Long, 1, "bisect", "borders");
  const int64_t count = rows.size(0), columns = rows.size(1), blocks = borders.numel() - 1;
  const auto* data = rows.const_data_ptr<float>();
  const auto* border = borders.const_data_ptr<int64_t>();
  require(blocks > 0 && (blocks & (blocks - 1)) == 0, "bisect: borders must part a power of two blocks, got ", blocks);
  require(border[0] == 0 && border[blocks] == count && std::is_sorted(border, border + blocks + 1),
          "bisect: borders must rise from 0 to ", count);
  Tensor order = torch::stable::new_empty(rows, {count}, ScalarType::Long);
  auto* ids = order.mutable_data_ptr<int64_t>();
  std::iota(ids, ids + count, 0);
  for (int64_t width = blocks; width > 1; width /= 2) {
    torch::stable::parallel_for(0, blocks / width, 1, [&](int64_t from, int64_t to) {
      std::vector<int64_t> sample;
      std::vector<float> values;
      std::vector<Projected> projected;
      Splitter splitter(data, columns);
      for (int64_t segment = from; segment < to; ++segment) {
        const int64_t begin = border[segment * width], end = border[(segment + 1) * width];
        const int64_t middle = border[segment * width + width / 2], size = end - begin;
        if (size < 2) continue;
        sample.clear();
        const int64_t stride = std::max<int64_t>(1, size / kSample);
        for (int64_t i = begin; i < end; i += stride) sample.push_back(ids[i]);
        splitter.find(sample);
        values.resize(size);
        projected.resize(size);
        dots_at(splitter.direction.data(), data, ids + begin, size, columns, values.data());
        // Weights that are not finite are refused when classes are drawn; until then they must not break the order.
        for (int64_t i = 0; i < size; ++i) projected[i] = {std::isfinite(values[i]) ? values[i] : 0.0f, ids[begin + i]};
        std::nth_element(projected.begin(), projected.begin() + (middle - begin), projected.end());
        for (int64_t i = 0; i < size; ++i) ids[begin + i] = projected[i].id;
      }
    });
  }
  torch::stable::parallel_for(0, blocks, 64, [&](int64_t from, int64_t to) {
    for (int64_t j = from; j < to; ++j) std::sort(ids + border[j], ids + border[j + 1]);
  });
  return order;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(manyclass, library) { library.def("bisect(Tensor rows, Tensor borders) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(manyclass, CPU, library) { library.impl("bisect", TORCH_BOX(&bisect)); }
