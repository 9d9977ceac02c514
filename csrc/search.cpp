// Search of the tree of blocks: each example visits the blocks with most of its mass and scores their classes exactly.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <tuple>

#include "codes.h"
#include "index.h"

namespace {

using namespace manyclass;

// A running log Σ exp.
struct LogSum {
  double largest = -INFINITY, sum = 0;

  // Adds Σ exp(values) and overwrites the values.
  void add(float* values, int64_t count) {
    if (count == 0) return;
    const float top = manyclass::largest(values, count);
    if (top == -INFINITY) return;
    add(top, exp_sum(values, count, top));
  }
  void add(double shift, double part) {
    if (shift > largest) sum *= std::exp(largest - shift), largest = shift;
    sum += part * std::exp(shift - largest);
  }
  float value() const { return static_cast<float>(sum > 0 ? largest + std::log(sum) : -INFINITY); }
};

// A search of one kTrial-th of the width tells whether an example needs own negatives. It needs none if the classes of all
// visited blocks have at most kFlat of the variance of a draw with the pool alone.
constexpr int64_t kTrial = 4;
constexpr double kFlat = 0.2;
// If none of about this many examples, evenly spaced in the batch, needs own negatives, the others are not searched.
constexpr int64_t kTried = 32;

// A search for k classes scores the best 2·k + kRescored candidates by code exactly.
constexpr int64_t kRescored = 64;

// The data of a search: the tree of blocks, the codes of the classes, and the class weights.
struct Index {
  const int8_t *mean, *code;
  const float *mean_scale, *spread, *code_scale, *weight, *bias;
  const int32_t* order;
  Layout layout;
  std::vector<Level> levels;
  std::vector<float> outlier_rows;  // with their offsets, one after the other
  int64_t columns, width, stride;
  bool absolute;

  Index(const Tensor& mean_, const Tensor& mean_scale_, const Tensor& spread_, const Tensor& code_, const Tensor& code_scale_,
        const Tensor& weight_, const Tensor& bias_, const Tensor& order_, int64_t outliers, int64_t blocks, int64_t top,
        bool absolute_, const char* op)
      : layout{order_.numel(), outliers, blocks}, absolute(absolute_) {
    check(code_, ScalarType::Char, 2, op, "code");
    check(code_scale_, ScalarType::Float, 1, op, "code_scale");
    check(weight_, ScalarType::Float, 2, op, "weight");
    check(bias_, ScalarType::Float, 1, op, "bias");
    check(order_, ScalarType::Int, 1, op, "order");
    const int64_t classes = layout.classes;
    const bool offsets = bias_.numel() > 0;
    width = weight_.size(1), columns = width + offsets, stride = code_stride(columns);
    check_nodes(mean_, mean_scale_, spread_, stride, op);
    check_layout(layout, top, mean_.size(0), op);
    require(weight_.size(0) == classes && (!offsets || bias_.numel() == classes), op,
            ": weight and bias must have one row per class of order");
    require(code_.size(0) == classes && code_.size(1) == stride && code_scale_.numel() == classes, op,
            ": code must have ", stride, " columns, and one row and code_scale per class");
    mean = mean_.const_data_ptr<int8_t>(), code = code_.const_data_ptr<int8_t>();
    mean_scale = mean_scale_.const_data_ptr<float>(), spread = spread_.const_data_ptr<float>();
    code_scale = code_scale_.const_data_ptr<float>(), weight = weight_.const_data_ptr<float>();
    bias = offsets ? bias_.const_data_ptr<float>() : nullptr;
    order = order_.const_data_ptr<int32_t>();
    levels = levels_of(layout, top);
    require(within(order, outliers, classes), op, ": order must hold classes in [0, ", classes, ")");
    outlier_rows.resize(outliers * columns);
    for (int64_t i = 0; i < outliers; ++i) {
      std::copy_n(weight + order[i] * width, width, outlier_rows.begin() + i * columns);
      if (bias) outlier_rows[(i + 1) * columns - 1] = bias[order[i]];
    }
  }

  // The output of a class by its weights.
  float output(const float* query, int64_t id) const {
    float logit;
    dots(query, weight + id * width, 1, width, &logit);
    if (bias) logit += bias[id];
    return absolute ? std::fabs(logit) : logit;
  }
};

// The search of one example.
struct Visit {
  const Index& index;
  std::vector<int16_t> codes;           // the query
  float scale = 0;
  std::vector<int32_t> beam, next;      // nodes that are followed, of this level and of the next
  std::vector<int32_t> nodes, sums, places;
  std::vector<float> scores, spreads;
  std::vector<float> masses_of;         // estimated log-masses of the nodes in `beam`
  std::vector<int32_t> ids;             // classes: the outliers, then the members of the visited blocks
  std::vector<float> outputs;           // of outliers exact, of the others by their codes
  std::vector<int64_t> starts, begins;  // where the members of each visited block begin, in `ids` and in the order of all
  LogSum pruned;                        // estimated mass of all that was not visited
  float cutoff = 0;                     // smallest estimated log-mass of a visited block
  bool finite = true;

  explicit Visit(const Index& index_)
      : index(index_), codes(index_.stride), ids(index_.order, index_.order + index_.layout.outliers) {}

  // Estimated log-masses of all nodes of a level, or of the children of the beam.
  void score(float norm, const Level& level, bool top) {
    const int64_t family = top ? level.nodes : kBranching, families = top ? 1 : static_cast<int64_t>(beam.size());
    const int64_t count = families * family;
    nodes.resize(count), sums.resize(count), scores.resize(count), spreads.resize(count);
    for (int64_t i = 0; i < families; ++i) {
      const auto first = static_cast<int32_t>(level.first + (top ? 0 : beam[i] * kBranching));
      __builtin_prefetch(index.mean_scale + first);
      __builtin_prefetch(index.spread + first);
      int32_t* family_nodes = nodes.data() + i * family;
      for (int32_t j = 0; j < family; ++j) family_nodes[j] = first + j;
    }
    code_dots_at(codes.data(), index.mean, nodes.data(), count, index.stride, sums.data());
    for (int64_t i = 0; i < families; ++i) {
      const float *scales = index.mean_scale + nodes[i * family], *spread = index.spread + nodes[i * family];
      scale_sums(sums.data() + i * family, scales, scale, family, scores.data() + i * family);
      std::copy_n(spread, family, spreads.data() + i * family);
    }
    finite &= masses(scores.data(), spreads.data(), count, norm, level.log_size, index.absolute) == 0;
  }

  // Keeps the best of the scored nodes in `beam`; the others are pruned.
  void keep_best(const Level& level, int64_t width) {
    const auto total = static_cast<int64_t>(scores.size());
    const int64_t kept = std::min(beam_width(index.layout, level, width), total);
    cutoff = kth_largest(scores.data(), total, kept);
    places.resize(total);
    select_best(scores.data(), total, cutoff, kept, places.data());
    next.resize(kept), masses_of.resize(kept);
    for (int64_t i = 0; i < kept; ++i) {
      next[i] = static_cast<int32_t>(nodes[places[i]] - level.first);
      masses_of[i] = scores[places[i]];
      scores[places[i]] = -INFINITY;
    }
    beam.swap(next);
    if (kept < total) pruned.add(scores.data(), total);
  }

  // Finds the best `width` blocks.
  void find(const float* query, int64_t width) {
    pruned = LogSum();
    float norm = 0;
    dots(query, query, 1, index.columns, &norm);
    scale = encode_query(query, index.columns, codes.data());
    finite = std::isfinite(norm) && scale == scale;
    for (size_t level = 0; finite && level < index.levels.size(); ++level) {
      score(norm, index.levels[level], level == 0);
      if (finite) keep_best(index.levels[level], width);  // scores that are not finite have no best
    }
  }

  // Whether own negatives would hardly help. `rate(block, size)` is the expected count of a block's classes in a pool of
  // `samples`, which reads `leaves[block]`. A class has the variance e²·(1/π − 1) in a draw with the pool alone. The best
  // blocks are scored, and the other blocks of the width are taken to have as much each. All that was pruned, of mass P, has
  // at least about P² · (1/samples − 1/classes), by the inequality of Cauchy and Schwarz.
  template <typename Rate>
  bool flat(const float* query, int64_t width, int64_t exclude, int64_t samples, const double* leaves,
            const Rate& rate) {
    if (width >= index.layout.blocks) return false;  // a visit of all classes has no error at all
    find(query, (width + kTrial - 1) / kTrial);
    for (const int32_t block : beam) __builtin_prefetch(leaves + block);
    score_classes(query);
    if (!finite || pruned.sum == 0) return false;
    leave_out(ids.data(), static_cast<int64_t>(ids.size()), exclude, outputs.data());
    const auto inside = static_cast<double>(index.layout.classes - index.layout.outliers);
    const double odds = std::max(0.0, 1 / static_cast<double>(samples) - 1 / inside);
    const double most = kFlat / kTrial * odds * pruned.sum * pruned.sum;
    double variance = 0;
    for (size_t i = 0; i < beam.size() && variance <= most; ++i) {
      double squares = 0;
      for (int64_t j = starts[i]; j < starts[i + 1]; ++j) squares += std::exp(2 * (outputs[j] - pruned.largest));
      variance += squares * (1 / rate(beam[i], starts[i + 1] - starts[i]) - 1);
    }
    return variance <= most;
  }

  // Visits no block, without a search.
  void visit_outliers(const float* query) {
    pruned = LogSum();
    forget_blocks();
    float norm = 0;
    dots(query, query, 1, index.columns, &norm);
    dots(query, index.outlier_rows.data(), index.layout.outliers, index.columns, outputs.data());
    finite = std::isfinite(norm) && finish_outputs(outputs.data(), index.layout.outliers, index.absolute) == 0;
  }

  // Visits no block after all: the pool accounts for all classes but the outliers.
  void leave_blocks() {
    pruned.add(masses_of.data(), static_cast<int64_t>(beam.size()));
    forget_blocks();
  }

  void forget_blocks() {
    beam.clear(), begins.clear(), starts.clear();
    ids.resize(index.layout.outliers), outputs.resize(index.layout.outliers);
  }

  // Scores the outliers and the members of the blocks. Children of ascending nodes are ascending, so the blocks are in the
  // order of the classes.
  void score_classes(const float* query) {
    if (!finite) return;
    const Layout& layout = index.layout;
    const int64_t outliers = layout.outliers;
    begins.clear(), starts.clear();
    ids.resize(outliers + static_cast<int64_t>(beam.size()) * (layout.classes / layout.blocks + 1));
    int64_t number = outliers;
    for (const int32_t block : beam) __builtin_prefetch(index.order + layout.border(block));
    for (const int32_t block : beam) {
      const int64_t begin = layout.border(block), size = layout.border(block + 1) - begin;
      begins.push_back(begin), starts.push_back(number);
      std::copy_n(index.order + begin, size, ids.begin() + number);
      number += size;
    }
    ids.resize(number), starts.push_back(number);
    if (!(finite = within(ids.data(), number, layout.classes))) return;
    sums.resize(number), outputs.resize(number), spreads.resize(number);
    const int32_t* members = ids.data() + outliers;
    for (int64_t i = 0; i < number - outliers; ++i) __builtin_prefetch(index.code_scale + members[i]);
    code_dots_at(codes.data(), index.code, members, number - outliers, index.stride, sums.data());
    for (int64_t i = 0; i < number - outliers; ++i) spreads[i] = index.code_scale[members[i]];
    scale_sums(sums.data(), spreads.data(), scale, number - outliers, outputs.data() + outliers);
    dots(query, index.outlier_rows.data(), outliers, index.columns, outputs.data());
    finite = finish_outputs(outputs.data(), number, index.absolute) == 0;
  }
};

// The own negatives of each example, drawn from the classes that it visits.
// query: (batch, columns)   exclude: (batch,), −1 for none   uniform: (batch,), float64
// block_of: (classes,), −1 for an outlier   sums: (2 · blocks,), float64
// pool: (samples,), positions of the shared pool, ascending   share: of the pool that is drawn uniformly
// -> ids (batch, number); log_count (batch, number), +inf for an empty slot; hidden (2, k): pairs of an example and a slot
//    of the pool that holds its excluded class, or one that its own draw accounts for; an estimate of the log of the whole
//    mass (batch,), NaN if it is not finite, and 0 for an example that was not searched
std::tuple<Tensor, Tensor, Tensor, Tensor> own_draw(
    const Tensor& query, const Tensor& exclude, const Tensor& uniform, const Tensor& mean, const Tensor& mean_scale,
    const Tensor& spread, const Tensor& code, const Tensor& code_scale, const Tensor& weight, const Tensor& bias,
    const Tensor& order, const Tensor& block_of, const Tensor& sums, const Tensor& pool, int64_t outliers, int64_t blocks,
    int64_t top, int64_t width, int64_t number, double share, bool absolute) {
  const char* op = "own_draw";
  check(query, ScalarType::Float, 2, op, "query");
  check(exclude, ScalarType::Long, 1, op, "exclude");
  check(uniform, ScalarType::Double, 1, op, "uniform");
  check(block_of, ScalarType::Int, 1, op, "block_of");
  check_sums(sums, op);
  check(pool, ScalarType::Long, 1, op, "pool");
  const Index index(mean, mean_scale, spread, code, code_scale, weight, bias, order, outliers, blocks, top, absolute, op);
  const int64_t batch = query.size(0), columns = query.size(1);
  require(columns == index.columns, op, ": query must have one column per feature, ", index.columns, ", got ", columns);
  require(exclude.numel() == batch && uniform.numel() == batch, op, ": exclude and uniform must be (batch,)");
  require(block_of.numel() == index.layout.classes, op, ": block_of must have one block per class");
  require(sums.numel() == 2 * blocks, op, ": sums must be (2 · blocks,)");
  check_range<int64_t>(width, 1, kMostClasses, op, "width");
  check_range<int64_t>(number, 1, kMostClasses, op, "number");
  check_range(share, 0.0, 1.0, op, "share");
  check_ids(exclude, -1, index.layout.classes, op, "exclude");
  check_ids(pool, 0, index.layout.classes, op, "pool");
  check_uniform(uniform, op);

  Tensor ids = torch::stable::new_empty(query, {batch, number}, ScalarType::Long);
  Tensor log_count = torch::stable::new_empty(query, {batch, number});
  Tensor total = torch::stable::new_empty(query, {batch});
  const auto* query_data = query.const_data_ptr<float>();
  const auto* exclude_data = exclude.const_data_ptr<int64_t>();
  const auto* uniform_data = uniform.const_data_ptr<double>();
  const auto* block_data = block_of.const_data_ptr<int32_t>();
  const auto* sum_data = sums.const_data_ptr<double>();
  const auto* pool_data = pool.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < batch; ++row) {
    const int64_t block = exclude_data[row] < 0 ? -1 : block_data[exclude_data[row]];
    require(-1 <= block && block < blocks, op, ": block_of must hold blocks in [-1, ", blocks, "), got ", block);
  }
  auto* id_data = ids.mutable_data_ptr<int64_t>();
  auto* count_data = log_count.mutable_data_ptr<float>();
  auto* total_data = total.mutable_data_ptr<float>();
  std::vector<std::vector<int64_t>> hidden(batch);
  const int64_t samples = pool.numel(), stretch = index.layout.classes / (samples + 1) + 1;
  require(std::is_sorted(pool_data, pool_data + samples), op, ": pool must hold positions of classes, ascending");
  std::vector<int64_t> slots_from(index.layout.classes / stretch + 1, samples);  // the first slot from each stretch on
  for (int64_t slot = samples - 1; slot >= 0; --slot) slots_from[pool_data[slot] / stretch] = slot;
  for (auto at = static_cast<int64_t>(slots_from.size()) - 2; at >= 0; --at) {
    slots_from[at] = std::min(slots_from[at], slots_from[at + 1]);
  }

  // Calls `use` for every slot of the pool that holds a position from `first` to before `last`.
  const auto each_slot = [&](int64_t first, int64_t last, const auto& use) {
    int64_t slot = slots_from[first / stretch];
    while (slot < samples && pool_data[slot] < first) ++slot;
    for (; slot < samples && pool_data[slot] < last; ++slot) use(slot);
  };
  const auto rate = [&](int64_t block, int64_t size) {
    return std::min(1.0, pool_count(index.layout, sum_data, block, size, samples, share));
  };
  const int64_t apart = (batch + kTried - 1) / kTried;
  std::atomic<bool> all_flat{true};
  const auto draw = [&](bool tried, int64_t begin, int64_t end) {
    Visit visit(index);
    std::vector<float> chance, of_pool;
    const bool searched = tried || !all_flat;
    for (int64_t at = begin; at < end; ++at) {
      if (!tried && at % apart == 0) continue;
      const int64_t row = tried ? at * apart : at;
      const float* query_row = query_data + row * columns;
      std::fill(id_data + row * number, id_data + (row + 1) * number, 0);
      std::fill(count_data + row * number, count_data + (row + 1) * number, INFINITY);
      total_data[row] = NAN;
      if (const int64_t target = exclude_data[row]; target >= 0) {
        const int64_t block = block_data[target];
        const int64_t first = block < 0 ? 0 : index.layout.border(block), last = index.layout.border(block + 1);
        each_slot(first, last, [&](int64_t slot) {
          if (index.order[pool_data[slot]] == target) hidden[row].push_back(slot);
        });
      }
      if (!searched) {
        visit.visit_outliers(query_row);
      } else if (visit.flat(query_row, width, exclude_data[row], samples, sum_data + blocks, rate)) {
        visit.leave_blocks();
      } else {
        all_flat = false;
        visit.find(query_row, width);
        visit.score_classes(query_row);
      }
      if (!visit.finite) continue;
      for (const int32_t block : visit.beam) __builtin_prefetch(sum_data + blocks + block);
      const auto count = static_cast<int64_t>(visit.ids.size());
      of_pool.assign(count, samples >= index.layout.classes ? 1.0f : 0.0f);  // those of the outliers
      for (size_t i = 0; i < visit.beam.size(); ++i) {
        const int64_t first = visit.starts[i], last = visit.starts[i + 1];
        std::fill(of_pool.begin() + first, of_pool.begin() + last, static_cast<float>(rate(visit.beam[i], last - first)));
      }
      leave_out(visit.ids.data(), count, exclude_data[row], visit.outputs.data());
      const float largest = manyclass::largest(visit.outputs.data(), count);
      std::vector<float>& e = visit.outputs;
      const float visited = largest > -INFINITY ? exp_sum(e.data(), count, largest) : 0.0f;
      if (visited > 0) visit.pruned.add(largest, visited);
      total_data[row] = searched ? visit.pruned.value() : 0.0f;
      if (visited == 0) continue;  // only the excluded class was visited
      chance.resize(count);
      choose(e.data(), of_pool.data(), count, number, visited, chance.data());
      double end_of = 0, point = uniform_data[row];
      int64_t slot = 0;
      for (int64_t i = 0; i < count; ++i) {
        end_of += chance[i];
        if (end_of > point && chance[i] > 0 && slot < number) {
          id_data[row * number + slot] = visit.ids[i];
          count_data[row * number + slot] = std::log(chance[i]);
          ++slot, ++point;
        }
      }
      const auto hide = [&](int64_t first, int64_t last, int64_t start) {
        each_slot(first, last, [&](int64_t slot) {
          if (chance[start + pool_data[slot] - first] > 0) hidden[row].push_back(slot);
        });
      };
      hide(0, outliers, 0);
      for (size_t i = 0; i < visit.beam.size(); ++i) {
        hide(visit.begins[i], visit.begins[i] + visit.starts[i + 1] - visit.starts[i], visit.starts[i]);
      }
    }
  };
  torch::stable::parallel_for(0, apart ? (batch + apart - 1) / apart : 0, 4,
                              [&](int64_t begin, int64_t end) { draw(true, begin, end); });
  torch::stable::parallel_for(0, apart > 1 ? batch : 0, 4, [&](int64_t begin, int64_t end) { draw(false, begin, end); });
  int64_t pairs = 0;
  for (const auto& slots : hidden) pairs += static_cast<int64_t>(slots.size());
  Tensor hidden_pairs = torch::stable::new_empty(query, {2, pairs}, ScalarType::Long);
  auto* pair_data = hidden_pairs.mutable_data_ptr<int64_t>();
  for (int64_t row = 0, at = 0; row < batch; ++row) {
    for (const int64_t slot : hidden[row]) pair_data[at] = row, pair_data[pairs + at++] = slot;
  }
  return {ids, log_count, hidden_pairs, total};
}

// The best classes of those that each example visits.
// -> outputs (batch, k) and ids (batch, k), best first; an estimate of the log of the whole mass (batch,), NaN if it is not
//    finite; the smallest estimated log-mass of a visited block (batch,)
std::tuple<Tensor, Tensor, Tensor, Tensor> best_classes(const Tensor& query, const Tensor& mean, const Tensor& mean_scale,
                                                        const Tensor& spread, const Tensor& code, const Tensor& code_scale,
                                                        const Tensor& weight, const Tensor& bias, const Tensor& order,
                                                        int64_t outliers, int64_t blocks, int64_t top, int64_t width,
                                                        int64_t k, bool absolute) {
  const char* op = "best_classes";
  check(query, ScalarType::Float, 2, op, "query");
  const Index index(mean, mean_scale, spread, code, code_scale, weight, bias, order, outliers, blocks, top, absolute, op);
  const int64_t batch = query.size(0), columns = query.size(1);
  require(columns == index.columns, op, ": query must have one column per feature, ", index.columns, ", got ", columns);
  check_range<int64_t>(width, 1, kMostClasses, op, "width");
  const int64_t inside = index.layout.classes - outliers;
  const int64_t smallest = outliers + (width < blocks ? inside / blocks * width : inside);
  require(k > 0 && k <= smallest, op, ": k must be in [1, ", smallest, "], the classes that are visited, got ", k);
  Tensor values = torch::stable::new_empty(query, {batch, k}), total = torch::stable::new_empty(query, {batch});
  Tensor cutoff = torch::stable::new_empty(query, {batch});
  Tensor ids = torch::stable::new_empty(query, {batch, k}, ScalarType::Long);
  const auto* query_data = query.const_data_ptr<float>();
  auto* value_data = values.mutable_data_ptr<float>();
  auto* total_data = total.mutable_data_ptr<float>();
  auto* cutoff_data = cutoff.mutable_data_ptr<float>();
  auto* id_data = ids.mutable_data_ptr<int64_t>();
  torch::stable::parallel_for(0, batch, 4, [&](int64_t begin, int64_t end) {
    Visit visit(index);
    std::vector<int32_t> place;
    for (int64_t row = begin; row < end; ++row) {
      visit.find(query_data + row * columns, width);
      visit.score_classes(query_data + row * columns);
      cutoff_data[row] = visit.cutoff;
      total_data[row] = NAN;
      if (!visit.finite) {
        std::fill(id_data + row * k, id_data + (row + 1) * k, 0);
        std::fill(value_data + row * k, value_data + (row + 1) * k, NAN);
        continue;
      }
      const auto count = static_cast<int64_t>(visit.ids.size());
      const int64_t rescored = std::min(count, 2 * k + kRescored);  // codes are rounded, and may be stale
      place.resize(count);
      float* outputs = visit.outputs.data();
      select_best(outputs, count, kth_largest(outputs, count, rescored), rescored, place.data());
      for (int64_t i = 0; i < rescored; ++i) {
        outputs[place[i]] = index.output(query_data + row * columns, visit.ids[place[i]]);
      }
      std::partial_sort(place.begin(), place.begin() + k, place.begin() + rescored,
                        [&](int32_t a, int32_t b) { return outputs[a] > outputs[b]; });
      for (int64_t i = 0; i < k; ++i) {
        value_data[row * k + i] = outputs[place[i]];
        id_data[row * k + i] = visit.ids[place[i]];
      }
      visit.pruned.add(outputs, count);
      total_data[row] = visit.pruned.value();
    }
  });
  return {values, ids, total, cutoff};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(manyclass, library) {
  library.def(
      "own_draw(Tensor query, Tensor exclude, Tensor uniform, Tensor mean, Tensor mean_scale, Tensor spread, Tensor code, "
      "Tensor code_scale, Tensor weight, Tensor bias, Tensor order, Tensor block_of, Tensor sums, Tensor pool, "
      "int outliers, int blocks, int top, int width, int number, float share, bool absolute) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "best_classes(Tensor query, Tensor mean, Tensor mean_scale, Tensor spread, Tensor code, Tensor code_scale, "
      "Tensor weight, Tensor bias, Tensor order, int outliers, "
      "int blocks, int top, int width, int k, bool absolute) -> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(manyclass, CPU, library) {
  library.impl("own_draw", TORCH_BOX(&own_draw));
  library.impl("best_classes", TORCH_BOX(&best_classes));
}
