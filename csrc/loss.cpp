// Sampled softmax loss and its gradients without a gathered copy of the class weights: rows are read in place.
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

// The log of an empty sum: finite, so that products with its slopes, which are 0, are defined.
constexpr float kNothing = -1e30f;

// Classes of the pool that a thread takes at a time. Sums over so many in float, then in double, are precise.
constexpr int64_t kSlice = 64;

// The loss of examples with own negatives and a shared pool.
// logits: (pool, batch), those of the pool, replaced by the derivatives of the loss up to a factor of each example
// query: (batch, columns)   weight: (num_classes, columns)   bias: (num_classes,) or (0,)
// classes: (batch, 1 + own), the positive first, or −1   log_count: (batch, own)   pool_log_count: (pool,)
// hidden: (2, pairs): examples and slots of the pool that are empty for them
// -> losses (batch,); outputs of the positives (batch,); the factors of the logits (batch,); derivatives by the logits of
//    the classes, and of these logits' part by the query (batch, columns)
// Without a positive the loss is the log-sum-exp of the corrected negatives, and its output 0.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> sampled_loss_(const Tensor& logits, const Tensor& query,
                                                                 const Tensor& weight, const Tensor& bias,
                                                                 const Tensor& classes, const Tensor& log_count,
                                                                 const Tensor& pool_log_count, const Tensor& hidden,
                                                                 bool absolute) {
  const char* op = "sampled_loss_";
  check(logits, ScalarType::Float, 2, op, "logits");
  check(query, ScalarType::Float, 2, op, "query");
  check(weight, ScalarType::Float, 2, op, "weight");
  check(bias, ScalarType::Float, 1, op, "bias");
  check(classes, ScalarType::Long, 2, op, "classes");
  check(log_count, ScalarType::Float, 2, op, "log_count");
  check(pool_log_count, ScalarType::Float, 1, op, "pool_log_count");
  check(hidden, ScalarType::Long, 2, op, "hidden");
  const int64_t batch = query.size(0), columns = query.size(1), slots = classes.size(1), shared = logits.size(0);
  require(weight.size(0) > 0 && weight.size(1) == columns, op, ": weight must have a class, and the columns of query");
  require(bias.numel() == 0 || bias.numel() == weight.size(0), op, ": bias must have one entry per class, or none");
  require(classes.size(0) == batch && log_count.size(0) == batch && log_count.size(1) + 1 == slots, op,
          ": classes must be (batch, 1 + own) and log_count (batch, own)");
  require(logits.size(1) == batch && pool_log_count.numel() == shared, op,
          ": logits must be (pool, batch) and pool_log_count (pool,)");
  check_ids(classes, -1, weight.size(0), op, "classes");
  const int64_t pairs = hidden.size(1);
  const auto* hidden_data = hidden.const_data_ptr<int64_t>();
  require(hidden.size(0) == 2, op, ": hidden must be (2, pairs)");
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t row = hidden_data[i], slot = hidden_data[pairs + i];
    require(0 <= row && row < batch && 0 <= slot && slot < shared, op,
            ": hidden must hold examples and slots of the pool, got (", row, ", ", slot, ")");
  }

  Tensor losses = torch::stable::new_empty(query, {batch}), positives = torch::stable::new_empty(query, {batch});
  Tensor factors = torch::stable::new_empty(query, {batch});
  Tensor slopes = torch::stable::new_empty(query, {batch, slots});
  Tensor query_slopes = torch::stable::new_empty(query, {batch, columns});
  const auto* query_data = query.const_data_ptr<float>();
  const auto* weight_data = weight.const_data_ptr<float>();
  const auto* bias_data = bias.numel() ? bias.const_data_ptr<float>() : nullptr;
  const auto* class_data = classes.const_data_ptr<int64_t>();
  const auto* count_data = log_count.const_data_ptr<float>();
  const auto* pool_count_data = pool_log_count.const_data_ptr<float>();
  auto* pool_data = logits.mutable_data_ptr<float>();
  auto* loss_data = losses.mutable_data_ptr<float>();
  auto* positive_data = positives.mutable_data_ptr<float>();
  auto* factor_data = factors.mutable_data_ptr<float>();
  auto* slope_data = slopes.mutable_data_ptr<float>();
  auto* query_slope_data = query_slopes.mutable_data_ptr<float>();
  const auto sign = [](float x) { return static_cast<float>((x > 0) - (x < 0)); };

  std::vector<float> pool_signs(absolute ? logits.numel() : 0);
  if (absolute) std::transform(pool_data, pool_data + logits.numel(), pool_signs.begin(), sign);
  if (absolute) std::transform(pool_data, pool_data + logits.numel(), pool_data, [](float x) { return std::fabs(x); });
  for (int64_t i = 0; i < pairs; ++i) pool_data[hidden_data[pairs + i] * batch + hidden_data[i]] = -INFINITY;
  // The largest of each example's terms, then sums of exponentials.
  const int64_t slices = (shared + kSlice - 1) / kSlice;
  const auto in_slices = [&](const auto& take) {
    torch::stable::parallel_for(0, slices, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) take(i, i * kSlice, std::min(kSlice, shared - i * kSlice));
    });
  };
  std::vector<float> found(slices * batch, -INFINITY), pool_shifts(batch, kNothing);
  in_slices([&](int64_t slice, int64_t first, int64_t count) {
    subtract_max_columns(pool_data + first * batch, pool_count_data + first, count, batch, found.data() + slice * batch);
  });
  const auto of_examples = [&](const auto& join) {
    for (int64_t slice = 0; slice < slices; ++slice) {
      for (int64_t i = 0; i < batch; ++i) join(i, found[slice * batch + i]);
    }
  };
  of_examples([&](int64_t i, float value) { pool_shifts[i] = std::max(pool_shifts[i], value); });
  std::fill(found.begin(), found.end(), 0.0f);
  in_slices([&](int64_t slice, int64_t first, int64_t count) {
    exp_sum_columns(pool_data + first * batch, count, batch, pool_shifts.data(), found.data() + slice * batch);
  });
  std::vector<double> pool_sums(batch);
  of_examples([&](int64_t i, float value) { pool_sums[i] += value; });
  torch::stable::parallel_for(0, batch, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> signs(slots);
    std::vector<int64_t> ids(slots);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t* own = class_data + row * slots;
      float* slope = slope_data + row * slots;
      std::transform(own, own + slots, ids.begin(), [](int64_t id) { return std::max<int64_t>(id, 0); });
      dots_at(query_data + row * columns, weight_data, ids.data(), slots, columns, slope);
      float largest = pool_shifts[row];
      for (int64_t k = 0; k < slots; ++k) {
        float logit = slope[k] + (bias_data ? bias_data[ids[k]] : 0.0f);
        signs[k] = absolute ? sign(logit) : 1.0f;
        if (absolute) logit = std::fabs(logit);
        if (k > 0) logit -= count_data[row * (slots - 1) + k - 1];
        slope[k] = own[k] < 0 ? -INFINITY : logit;
        largest = std::max(largest, slope[k]);
      }
      const bool alone = own[0] < 0;
      const double positive = alone ? 0 : slope[0];
      positive_data[row] = static_cast<float>(positive);
      const double first = alone ? 0 : std::exp(positive - largest);
      const double shrink = std::exp(static_cast<double>(pool_shifts[row]) - largest);
      const double rest = exp_sum(slope + 1, slots - 1, largest) + pool_sums[row] * shrink;
      const double total = rest + first;
      loss_data[row] = total == 0 ? kNothing : static_cast<float>(std::log(total) + largest - positive);
      // −rest/total instead of first/total − 1 keeps its precision if the positive has nearly all the mass.
      slope[0] = alone ? 0.0f : signs[0] * static_cast<float>(-rest / total);
      const double scale = total == 0 ? 0 : 1 / total;
      for (int64_t k = 1; k < slots; ++k) slope[k] *= signs[k] * static_cast<float>(scale);
      factor_data[row] = static_cast<float>(shrink * scale);
      // The rows were just read for the logits: they are still in the nearest cache.
      combine_at(weight_data, ids.data(), slope, slots, columns, query_slope_data + row * columns);
    }
  });
  if (absolute) std::transform(pool_data, pool_data + logits.numel(), pool_signs.data(), pool_data, std::multiplies<>());
  return {losses, positives, factors, slopes, query_slopes};
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

// Gradients of the class weights, each row once.
// slopes: (batch, slots), derivatives by the logits of `classes`; a slot without a slope needs no row
// classes: (batch, slots), −1 for none, the positive first   log_count: (batch, slots − 1), of the others
// pool, pool_log_count: (shared,)   pool_values: (shared, columns), gradients of its rows, and of the bias,
// pool_bias_values (shared,)
// -> rows, sorted (rows,), their gradients (rows, columns), those of the bias (rows,), and how many times too large the
//    squared lengths of the gradients are, since classes were drawn (rows,); see importance.py
std::tuple<Tensor, Tensor, Tensor, Tensor> row_gradients(const Tensor& query, const Tensor& slopes, const Tensor& classes,
                                                         const Tensor& log_count, const Tensor& pool,
                                                         const Tensor& pool_log_count, const Tensor& pool_values,
                                                         const Tensor& pool_bias_values, int64_t num_classes) {
  const char* op = "row_gradients";
  check(query, ScalarType::Float, 2, op, "query");
  check(classes, ScalarType::Long, 2, op, "classes");
  check(slopes, ScalarType::Float, 2, op, "slopes");
  check(log_count, ScalarType::Float, 2, op, "log_count");
  check(pool, ScalarType::Long, 1, op, "pool");
  check(pool_log_count, ScalarType::Float, 1, op, "pool_log_count");
  check(pool_values, ScalarType::Float, 2, op, "pool_values");
  check(pool_bias_values, ScalarType::Float, 1, op, "pool_bias_values");
  const int64_t batch = query.size(0), columns = query.size(1), slots = classes.size(1), shared = pool.numel();
  require(classes.size(0) == batch && slopes.size(0) == batch && slopes.size(1) == slots, op,
          ": classes and slopes must be (batch, slots)");
  require(slots > 0 && log_count.size(0) == batch && log_count.size(1) == slots - 1, op,
          ": log_count must be (batch, slots - 1)");
  require(pool_log_count.numel() == shared, op, ": pool_log_count must have one number per class of the pool");
  require(pool_values.size(0) == shared && pool_values.size(1) == columns && pool_bias_values.numel() == shared, op,
          ": pool_values must be (pool, columns) and pool_bias_values (pool,)");
  check_range<int64_t>(num_classes, 1, kMostClasses, op, "num_classes");
  check_ids(classes, -1, num_classes, op, "classes");
  check_ids(pool, 0, num_classes, op, "pool");

  const auto* class_data = classes.const_data_ptr<int64_t>();
  const auto* pool_data = pool.const_data_ptr<int64_t>();
  const auto* slope_data = slopes.const_data_ptr<float>();
  const auto* count_data = log_count.const_data_ptr<float>();
  const auto* pool_count_data = pool_log_count.const_data_ptr<float>();
  std::vector<int64_t> keys, positions, starts;  // positions from batch · slots on are those of the pool
  keys.reserve(classes.numel() + shared), positions.reserve(classes.numel() + shared);
  for (int64_t i = 0; i < classes.numel(); ++i) {
    if (class_data[i] >= 0 && slope_data[i] != 0) keys.push_back(class_data[i]), positions.push_back(i);
  }
  for (int64_t i = 0; i < shared; ++i) keys.push_back(pool_data[i]), positions.push_back(classes.numel() + i);
  sort_with_positions(keys, positions, num_classes);
  for (size_t i = 0; i < keys.size(); ++i) {
    if (i == 0 || keys[i] != keys[i - 1]) starts.push_back(static_cast<int64_t>(i));
  }
  const auto rows = static_cast<int64_t>(starts.size());
  starts.push_back(static_cast<int64_t>(keys.size()));

  Tensor row_ids = torch::stable::new_empty(classes, {rows});
  Tensor values = torch::stable::new_empty(query, {rows, columns});
  Tensor bias_values = torch::stable::new_empty(query, {rows});
  Tensor excess = torch::stable::new_empty(query, {rows});
  const auto* query_data = query.const_data_ptr<float>();
  const auto* pool_value_data = pool_values.const_data_ptr<float>();
  const auto* pool_bias_data = pool_bias_values.const_data_ptr<float>();
  auto* row_data = row_ids.mutable_data_ptr<int64_t>();
  auto* value_data = values.mutable_data_ptr<float>();
  auto* bias_data = bias_values.mutable_data_ptr<float>();
  auto* excess_data = excess.mutable_data_ptr<float>();
  const auto square_of = [&](const float* row) {
    float square;
    dots(row, row, 1, columns, &square);
    return square;
  };
  std::vector<float> norms(batch);
  for (int64_t i = 0; i < batch; ++i) norms[i] = square_of(query_data + i * columns);
  // A row belongs to one thread and its examples are in order, so the sum does not depend on the number of threads.
  torch::stable::parallel_for(0, rows, 64, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> examples;
    std::vector<float> factors;
    for (int64_t row = begin; row < end; ++row) {
      examples.clear(), factors.clear();
      float total = 0;
      // Squared lengths of the gradients of all draws, and these times the probabilities.
      float drawn = 0, right = 0;
      const auto add_draw = [&](float square, float chance) { drawn += square, right += square * std::min(chance, 1.0f); };
      int64_t i = starts[row];
      for (; i < starts[row + 1] && positions[i] < classes.numel(); ++i) {
        examples.push_back(positions[i] / slots);
        factors.push_back(slope_data[positions[i]]);
        total += factors.back();
        const int64_t example = examples.back(), slot = positions[i] % slots;
        if (slot == 0) continue;  // a positive is not drawn
        const float chance = std::exp(count_data[example * (slots - 1) + slot - 1]);
        add_draw(factors.back() * factors.back() * norms[example], chance);
      }
      row_data[row] = keys[starts[row]];
      float* out = value_data + row * columns;
      combine_at(query_data, examples.data(), factors.data(), static_cast<int64_t>(examples.size()), columns, out);
      float length = 0, weight = 0;  // of the slots of the pool, whose gradients are the same
      for (; i < starts[row + 1]; ++i) {
        const int64_t slot = positions[i] - classes.numel();
        const float* value = pool_value_data + slot * columns;
        length += std::sqrt(square_of(value)), weight += std::exp(-pool_count_data[slot]);
        add_row(value, columns, out);
        total += pool_bias_data[slot];
      }
      bias_data[row] = total;
      if (weight > 0) add_draw(length * length, 1 / weight);
      // Of a row with a single draw nothing else is left; cancelling draws of others must not leave less.
      const float square = square_of(out), wanted = std::max(square - drawn + right, right);
      excess_data[row] = wanted < square ? square / wanted : 1.0f;
    }
  });
  return {row_ids, values, bias_values, excess};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(manyclass, library) {
  library.def(
      "sampled_loss_(Tensor(a!) logits, Tensor query, Tensor weight, Tensor bias, Tensor classes, Tensor log_count, "
      "Tensor pool_log_count, Tensor hidden, bool absolute) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "row_gradients(Tensor query, Tensor slopes, Tensor classes, Tensor log_count, Tensor pool, Tensor pool_log_count, "
      "Tensor pool_values, Tensor pool_bias_values, int num_classes) -> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(manyclass, CPU, library) {
  library.impl("sampled_loss_", TORCH_BOX(&sampled_loss_));
  library.impl("row_gradients", TORCH_BOX(&row_gradients));
}
