// Sampled softmax loss and its gradients without a gathered copy of the class weights: rows are read where they lie.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "simd.h"

namespace {

using namespace manyclass;

// The log of a sum of nothing: finite, so that its slopes, zero, can be multiplied with.
constexpr float kNothing = -1e30f;

void check_classes(const Tensor& classes, int64_t limit, const char* op) {
  const auto* data = classes.const_data_ptr<int64_t>();
  const bool inside = std::all_of(data, data + classes.numel(), [&](int64_t id) { return 0 <= id && id < limit; });
  STD_TORCH_CHECK(inside, op, ": classes must be in [0, ", limit, ")");
}

// query: (batch, columns)   weight: (num_classes, columns)   bias: (num_classes,) or (0,)
// classes: (batch, 1 + negatives), the positive first   log_count: (batch, negatives)
// -> losses (batch,), their derivatives by the logits, shape of classes, and by the query, shape of query
std::tuple<Tensor, Tensor, Tensor> sampled_loss(const Tensor& query, const Tensor& weight, const Tensor& bias,
                                                const Tensor& classes, const Tensor& log_count, bool absolute) {
  const char* op = "sampled_loss";
  check(query, ScalarType::Float, 2, op, "query");
  check(weight, ScalarType::Float, 2, op, "weight");
  check(bias, ScalarType::Float, 1, op, "bias");
  check(classes, ScalarType::Long, 2, op, "classes");
  check(log_count, ScalarType::Float, 2, op, "log_count");
  const int64_t batch = query.size(0), columns = query.size(1), slots = classes.size(1);
  STD_TORCH_CHECK(weight.size(1) == columns, op, ": query and weight differ in columns");
  STD_TORCH_CHECK(bias.numel() == 0 || bias.numel() == weight.size(0), op, ": bias must have one entry per class");
  STD_TORCH_CHECK(classes.size(0) == batch && log_count.size(0) == batch && log_count.size(1) + 1 == slots, op,
                  ": classes must be (batch, 1 + negatives) and log_count (batch, negatives)");
  check_classes(classes, weight.size(0), op);

  Tensor losses = torch::stable::new_empty(query, {batch});
  Tensor slopes = torch::stable::new_empty(query, {batch, slots});
  Tensor query_slopes = torch::stable::new_empty(query, {batch, columns});
  const auto* query_data = query.const_data_ptr<float>();
  const auto* weight_data = weight.const_data_ptr<float>();
  const auto* bias_data = bias.numel() ? bias.const_data_ptr<float>() : nullptr;
  const auto* class_data = classes.const_data_ptr<int64_t>();
  const auto* count_data = log_count.const_data_ptr<float>();
  auto* loss_data = losses.mutable_data_ptr<float>();
  auto* slope_data = slopes.mutable_data_ptr<float>();
  auto* query_slope_data = query_slopes.mutable_data_ptr<float>();

  torch::stable::parallel_for(0, batch, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> signs(slots);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t* ids = class_data + row * slots;
      float* slope = slope_data + row * slots;
      dots_at(query_data + row * columns, weight_data, ids, slots, columns, slope);
      float largest = -INFINITY;
      for (int64_t k = 0; k < slots; ++k) {
        float logit = slope[k] + (bias_data ? bias_data[ids[k]] : 0.0f);
        signs[k] = absolute ? static_cast<float>((logit > 0) - (logit < 0)) : 1.0f;
        if (absolute) logit = std::fabs(logit);
        slope[k] = k == 0 ? logit : logit - count_data[row * (slots - 1) + k - 1];
        largest = std::max(largest, slope[k]);
      }
      const double positive = slope[0], first = std::exp(positive - largest);
      const double rest = exp_sum(slope + 1, slots - 1, largest), total = rest + first;
      loss_data[row] = static_cast<float>(std::log(total) + largest - positive);
      // −rest/total and not first/total − 1: it keeps its precision where the positive takes nearly all.
      slope[0] = signs[0] * static_cast<float>(-rest / total);
      for (int64_t k = 1; k < slots; ++k) slope[k] = signs[k] * static_cast<float>(slope[k] / total);
      // The rows were just read for the logits: they are still in the nearest cache.
      combine_at(weight_data, ids, slope, slots, columns, query_slope_data + row * columns);
    }
  });
  return {losses, slopes, query_slopes};
}

// The same for a pool of negatives that all examples share. logits: (batch, negatives), replaced by the derivatives
// positive: (batch,), logits of the positives   log_count, pool: (negatives,)   target: (batch,)
// -> losses (batch,) and their derivatives by the logit of the positive (batch,)
// An example with target −1 has no positive; instead of a loss it gets the log-sum-exp of the corrected negatives, and
// the derivative 0.
std::tuple<Tensor, Tensor> pooled_loss_(const Tensor& logits, const Tensor& positive, const Tensor& log_count,
                                        const Tensor& pool, const Tensor& target, bool absolute) {
  const char* op = "pooled_loss_";
  check(logits, ScalarType::Float, 2, op, "logits");
  check(positive, ScalarType::Float, 1, op, "positive");
  check(log_count, ScalarType::Float, 1, op, "log_count");
  check(pool, ScalarType::Long, 1, op, "pool");
  check(target, ScalarType::Long, 1, op, "target");
  const int64_t batch = logits.size(0), negatives = logits.size(1);
  STD_TORCH_CHECK(positive.numel() == batch && target.numel() == batch, op, ": positive and target must be (batch,)");
  STD_TORCH_CHECK(log_count.numel() == negatives && pool.numel() == negatives, op,
                  ": log_count and pool must be (negatives,)");
  Tensor losses = torch::stable::new_empty(positive, {batch});
  Tensor positive_slopes = torch::stable::new_empty(positive, {batch});
  const auto* positive_data = positive.const_data_ptr<float>();
  const auto* count_data = log_count.const_data_ptr<float>();
  const auto* pool_data = pool.const_data_ptr<int64_t>();
  const auto* target_data = target.const_data_ptr<int64_t>();
  auto* slope_data = logits.mutable_data_ptr<float>();
  auto* loss_data = losses.mutable_data_ptr<float>();
  auto* positive_slope_data = positive_slopes.mutable_data_ptr<float>();

  // Where each class stands in the pool, so that positives in it are found fast.
  std::vector<std::pair<int64_t, int64_t>> places(negatives);
  for (int64_t k = 0; k < negatives; ++k) places[k] = {pool_data[k], k};
  std::sort(places.begin(), places.end());
  const auto sign = [](float x) { return static_cast<float>((x > 0) - (x < 0)); };
  torch::stable::parallel_for(0, batch, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> signs(absolute ? negatives : 0);
    for (int64_t row = begin; row < end; ++row) {
      float* slope = slope_data + row * negatives;
      if (absolute) {
        std::transform(slope, slope + negatives, signs.begin(), sign);
        for (int64_t k = 0; k < negatives; ++k) slope[k] = std::fabs(slope[k]);
      }
      const bool alone = target_data[row] < 0;
      const float own = alone ? -INFINITY : absolute ? std::fabs(positive_data[row]) : positive_data[row];
      const auto hits = std::equal_range(places.begin(), places.end(), std::make_pair(target_data[row], int64_t{0}),
                                         [](const auto& a, const auto& b) { return a.first < b.first; });
      for (auto hit = hits.first; hit != hits.second; ++hit) slope[hit->second] = -INFINITY;
      const float largest = subtract_max(slope, count_data, negatives, own);
      if (largest == -INFINITY) {  // neither a positive nor a slot that is not empty
        std::fill(slope, slope + negatives, 0.0f);
        loss_data[row] = kNothing;
        positive_slope_data[row] = 0;
        continue;
      }
      const double rest = exp_sum(slope, negatives, largest), first = std::exp(static_cast<double>(own) - largest);
      const double total = rest + first;
      loss_data[row] = static_cast<float>(std::log(total) + largest - (alone ? 0 : own));
      positive_slope_data[row] =
          alone ? 0 : static_cast<float>(-rest / total) * (absolute ? sign(positive_data[row]) : 1.0f);
      const auto scale = static_cast<float>(1 / total);
      for (int64_t k = 0; k < negatives; ++k) slope[k] *= scale;
      if (absolute) std::transform(slope, slope + negatives, signs.begin(), slope, std::multiplies<>());
    }
  });
  return {losses, positive_slopes};
}

// Sorts keys and carries their positions along: least significant digit first, so equal keys keep their order.
void sort_with_positions(std::vector<int64_t>& keys, std::vector<int64_t>& positions, int64_t limit) {
  constexpr int64_t kBits = 11, kBuckets = 1 << kBits;
  std::vector<int64_t> other_keys(keys.size()), other_positions(keys.size());
  for (int64_t shift = 0; (limit - 1) >> shift > 0; shift += kBits) {
    std::vector<int64_t> next(kBuckets + 1);
    for (int64_t key : keys) ++next[(key >> shift & (kBuckets - 1)) + 1];
    std::partial_sum(next.begin(), next.end(), next.begin());
    for (size_t i = 0; i < keys.size(); ++i) {
      const int64_t to = next[keys[i] >> shift & (kBuckets - 1)]++;
      other_keys[to] = keys[i];
      other_positions[to] = positions[i];
    }
    keys.swap(other_keys);
    positions.swap(other_positions);
  }
}

// Gradients of the class weights, each row once. slopes: derivatives by the logits, shape of classes.
// -> rows, sorted (rows,), their gradients (rows, columns), and those of the bias (rows, 1)
std::tuple<Tensor, Tensor, Tensor> sampled_loss_rows(const Tensor& query, const Tensor& classes, const Tensor& slopes,
                                                     int64_t num_classes) {
  const char* op = "sampled_loss_rows";
  check(query, ScalarType::Float, 2, op, "query");
  check(classes, ScalarType::Long, 2, op, "classes");
  check(slopes, ScalarType::Float, 2, op, "slopes");
  const int64_t batch = query.size(0), columns = query.size(1), slots = classes.size(1);
  STD_TORCH_CHECK(classes.size(0) == batch && slopes.size(0) == batch && slopes.size(1) == slots, op,
                  ": classes and slopes must be (batch, slots)");
  check_classes(classes, num_classes, op);

  const auto* class_data = classes.const_data_ptr<int64_t>();
  std::vector<int64_t> keys(class_data, class_data + classes.numel()), positions(keys.size()), starts;
  std::iota(positions.begin(), positions.end(), 0);
  sort_with_positions(keys, positions, num_classes);
  for (size_t i = 0; i < keys.size(); ++i) {
    if (i == 0 || keys[i] != keys[i - 1]) starts.push_back(static_cast<int64_t>(i));
  }
  const auto rows = static_cast<int64_t>(starts.size());
  starts.push_back(static_cast<int64_t>(keys.size()));

  Tensor row_ids = torch::stable::new_empty(classes, {rows});
  Tensor values = torch::stable::new_empty(query, {rows, columns});
  Tensor bias_values = torch::stable::new_empty(query, {rows, 1});
  const auto* query_data = query.const_data_ptr<float>();
  const auto* slope_data = slopes.const_data_ptr<float>();
  auto* row_data = row_ids.mutable_data_ptr<int64_t>();
  auto* value_data = values.mutable_data_ptr<float>();
  auto* bias_data = bias_values.mutable_data_ptr<float>();
  // A row belongs to one thread and its examples come in order: the sum is the same however many threads there are.
  torch::stable::parallel_for(0, rows, 64, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> examples;
    std::vector<float> factors;
    for (int64_t row = begin; row < end; ++row) {
      examples.clear(), factors.clear();
      float total = 0;
      for (int64_t i = starts[row]; i < starts[row + 1]; ++i) {
        examples.push_back(positions[i] / slots);
        factors.push_back(slope_data[positions[i]]);
        total += factors.back();
      }
      row_data[row] = keys[starts[row]];
      bias_data[row] = total;
      combine_at(query_data, examples.data(), factors.data(), static_cast<int64_t>(examples.size()), columns,
                 value_data + row * columns);
    }
  });
  return {row_ids, values, bias_values};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(manyclass, library) {
  library.def(
      "sampled_loss(Tensor query, Tensor weight, Tensor bias, Tensor classes, Tensor log_count, bool absolute) -> "
      "(Tensor, Tensor, Tensor)");
  library.def(
      "pooled_loss_(Tensor(a!) logits, Tensor positive, Tensor log_count, Tensor pool, Tensor target, bool absolute) -> "
      "(Tensor, Tensor)");
  library.def(
      "sampled_loss_rows(Tensor query, Tensor classes, Tensor slopes, int num_classes) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(manyclass, CPU, library) {
  library.impl("sampled_loss", TORCH_BOX(&sampled_loss));
  library.impl("pooled_loss_", TORCH_BOX(&pooled_loss_));
  library.impl("sampled_loss_rows", TORCH_BOX(&sampled_loss_rows));
}
