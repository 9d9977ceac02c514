// The paper's divide-and-conquer tree (Section 3.2): draws from ⟨φ(h), z(C)⟩, and sums z(C) after an update.
//
// Classes are in leaves of `leaf_size`, in order. Level l has sizes[l] nodes; node j of a level is the parent
// of nodes j·branching, … of the next, and the last level is that of the leaves. The first level hangs under one root.
// Sums of all levels are in one array, the first level first.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "check.h"
#include "simd.h"

namespace {

using namespace manyclass;

// Largest parameters of the kernel alpha·⟨h, w⟩^degree + 1, so that values stay in the range of floating point numbers.
constexpr int64_t kMostDegree = 64;
constexpr double kMostAlpha = 1e30;

struct Tree {
  const float* sums;
  const float* weight;
  int64_t features, columns, classes, leaf_size, branching;
  std::vector<int64_t> sizes, first, span;  // per level: nodes, first row in `sums`, classes below one node

  Tree(const Tensor& sums_, const Tensor& weight_, std::vector<int64_t> sizes_, int64_t leaf_size_, int64_t branching_,
       const char* op)
      : features(0), columns(0), classes(0), leaf_size(leaf_size_), branching(branching_), sizes(std::move(sizes_)) {
    check(sums_, ScalarType::Float, 2, op, "sums");
    check(weight_, ScalarType::Float, 2, op, "weight");
    features = sums_.size(1), classes = weight_.size(0), columns = weight_.size(1);
    require(!sizes.empty(), op, ": sizes must have a level");
    check_range<int64_t>(classes, 1, kMostClasses, op, "the number of classes");
    check_range<int64_t>(leaf_size, 1, classes, op, "leaf_size");
    check_range<int64_t>(branching, 2, kMostClasses, op, "branching");
    require(features % kFeatureBlock == 0, op, ": sums must be padded to a multiple of ", kFeatureBlock, " columns");
    span.assign(sizes.size(), leaf_size);
    for (size_t level = sizes.size() - 1; level-- > 0;) {
      require(span[level + 1] < classes, op, ": sizes must have no level above a single node");
      span[level] = span[level + 1] * branching;
    }
    int64_t nodes = 0;
    for (size_t level = 0; level < sizes.size(); ++level) {
      first.push_back(nodes);
      const int64_t fitting = (classes + span[level] - 1) / span[level];
      require(sizes[level] == fitting, op, ": sizes must fit the classes: ", fitting, " nodes, got ", sizes[level]);
      nodes += sizes[level];
    }
    require(sums_.size(0) == nodes, op, ": sums must have ", nodes, " rows, got ", sums_.size(0));
    sums = sums_.const_data_ptr<float>();
    weight = weight_.const_data_ptr<float>();
  }

  const float* sum(size_t level, int64_t node) const { return sums + (first[level] + node) * features; }
  int64_t count(size_t level, int64_t node) const { return std::min(classes, (node + 1) * span[level]) - node * span[level]; }
};

// One draw on its way down: its uniform number, stretched to [0, 1) within the node that it has reached.
struct Path {
  double uniform, probability;
  int64_t slot;
};

// The draws of one example. Draws are sorted by their uniform numbers, so those that reach one node are adjacent, and
// each node is evaluated once for all of them.
struct Example {
  const Tree& tree;
  const float *query, *features;
  int64_t exclude;        // −1: none
  double excluded_value;  // K(h, w_exclude)
  double alpha, floor;
  int64_t degree;
  bool whole_leaf;
  int64_t* ids;
  double* log_prob;
  std::vector<float> logits;
  std::vector<std::vector<double>> scratch;  // per level
  bool finite;                               // whether all masses were

  // Turns masses into probabilities: none below `floor` of its share, so that rounding, staleness or a negative
  // feature map cannot make a class impossible. counts[i] classes can be drawn from part i.
  void normalise(double* mass, const double* counts, int64_t size) {
    double total = 0, all = 0, sum = 0;
    for (int64_t i = 0; i < size; ++i) {
      mass[i] = counts[i] > 0 ? std::max(mass[i], 0.0) : 0.0;
      total += mass[i];
      all += counts[i];
    }
    finite &= total < INFINITY;
    if (!finite) total = 0;  // continue by the counts; the result is not used
    for (int64_t i = 0; i < size; ++i) {
      mass[i] = total > 0 ? std::max(mass[i], floor * total * counts[i] / all) : counts[i];
      sum += mass[i];
    }
    for (int64_t i = 0; i < size; ++i) mass[i] /= sum;
  }

  // Assigns the draws [begin, end) to the parts; calls visit(part, begin, end) for each part with draws.
  template <class Visit>
  void deal(const double* probability, int64_t size, Path* begin, Path* end, const Visit& visit) const {
    int64_t last = size - 1;
    while (last > 0 && probability[last] <= 0) --last;
    double before = 0;
    for (int64_t part = 0; part <= last && begin < end; ++part) {
      const double p = probability[part];
      Path* stop = begin;
      // The last part that can be drawn takes what rounding left over.
      while (stop < end && p > 0 && (part == last || stop->uniform < before + p)) {
        stop->uniform = std::clamp((stop->uniform - before) / p, 0.0, 1 - 0x1p-53);
        stop->probability *= p;
        ++stop;
      }
      if (stop > begin) visit(part, begin, stop);
      begin = stop;
      before += p;
    }
  }

  void root(const float* top, Path* begin, Path* end) {
    const int64_t size = tree.sizes[0];
    visit_children(0, 0, size, begin, end, [&](int64_t child) { return static_cast<double>(top[child]); });
  }

  // Splits draws among the children [start, stop) at `level`; raw(child) is the child's mass as the sums give it.
  template <class Raw>
  void visit_children(size_t level, int64_t start, int64_t stop, Path* begin, Path* end, const Raw& raw) {
    const int64_t size = stop - start;
    auto& buffer = scratch[level];
    buffer.resize(3 * size);
    double *probability = buffer.data(), *counts = probability + size, *masses = counts + size;
    const int64_t excluded = exclude < 0 ? -1 : exclude / tree.span[level];
    for (int64_t i = 0; i < size; ++i) {
      const bool hit = start + i == excluded;
      masses[i] = raw(start + i);
      probability[i] = hit ? masses[i] - excluded_value : masses[i];
      counts[i] = static_cast<double>(tree.count(level, start + i) - hit);
    }
    normalise(probability, counts, size);
    deal(probability, size, begin, end, [&](int64_t part, Path* from, Path* to) {
      node(level, start + part, scratch[level][2 * size + part], from, to);
    });
  }

  void node(size_t level, int64_t index, double mass, Path* begin, Path* end) {
    if (level + 1 == tree.sizes.size()) return leaf(index, begin, end);
    const int64_t start = index * tree.branching, stop = std::min(start + tree.branching, tree.sizes[level + 1]);
    double rest = mass;
    visit_children(level + 1, start, stop, begin, end, [&](int64_t child) {
      // The last child has what its siblings leave of the parent; where little is left the difference would be mostly
      // rounding, and it is evaluated too.
      if (child == stop - 1 && child > start && rest > 0.1 * mass) return rest;
      const double value = dot(features, tree.sum(level + 1, child), tree.features);
      rest -= value;
      return value;
    });
  }

  void leaf(int64_t index, Path* begin, Path* end) {
    if (whole_leaf) {
      for (; begin < end; ++begin) finish(*begin, index);
      return;
    }
    const int64_t start = index * tree.leaf_size, size = tree.count(tree.sizes.size() - 1, index);
    auto& buffer = scratch.back();
    buffer.resize(2 * size);
    double *probability = buffer.data(), *counts = probability + size;
    dots(query, tree.weight + start * tree.columns, size, tree.columns, logits.data());
    for (int64_t i = 0; i < size; ++i) {
      double power = 1;
      for (int64_t k = 0; k < degree; ++k) power *= logits[i];
      probability[i] = alpha * power + 1;
      counts[i] = start + i == exclude ? 0 : 1;
    }
    normalise(probability, counts, size);
    deal(probability, size, begin, end, [&](int64_t part, Path* from, Path* to) {
      for (; from < to; ++from) finish(*from, start + part);
    });
  }

  void finish(const Path& path, int64_t id) const {
    ids[path.slot] = id;
    log_prob[path.slot] = std::log(path.probability);
  }
};

// features: (batch, features) φ(h), padded   query: (batch, columns)   top: (batch, sizes[0]) masses of the first level
// uniform: (batch, draws)   exclude: (batch,) or (0,)   excluded_value: K(h, w_exclude), like exclude
// -> classes, or leaves if whole_leaf, and their log probabilities, both (batch, draws), NaN if a mass is not finite
std::tuple<Tensor, Tensor> tree_draw(const Tensor& features, const Tensor& query, const Tensor& top, const Tensor& sums,
                                     const Tensor& weight, std::vector<int64_t> sizes, int64_t leaf_size,
                                     int64_t branching, const Tensor& uniform, const Tensor& exclude,
                                     const Tensor& excluded_value, int64_t degree, double alpha, double floor,
                                     bool whole_leaf) {
  const Tree tree(sums, weight, std::move(sizes), leaf_size, branching, "tree_draw");
  check(features, ScalarType::Float, 2, "tree_draw", "features");
  check(query, ScalarType::Float, 2, "tree_draw", "query");
  check(top, ScalarType::Float, 2, "tree_draw", "top");
  check(uniform, ScalarType::Double, 2, "tree_draw", "uniform");
  check(exclude, ScalarType::Long, 1, "tree_draw", "exclude");
  check(excluded_value, ScalarType::Float, 1, "tree_draw", "excluded_value");
  const int64_t batch = uniform.size(0), draws = uniform.size(1);
  require(features.size(0) == batch && query.size(0) == batch && top.size(0) == batch,
          "tree_draw: features, query, top and uniform must have one row per example");
  require(features.size(1) == tree.features && query.size(1) == tree.columns && top.size(1) == tree.sizes[0],
          "tree_draw: features, query and top must have the columns of sums, of weight, and one per node of sizes[0]");
  require((exclude.numel() == batch || exclude.numel() == 0) && exclude.numel() == excluded_value.numel(),
          "tree_draw: exclude and excluded_value must have one entry per example, or none");
  check_range<int64_t>(degree, 1, kMostDegree, "tree_draw", "degree");
  check_range(alpha, 0.0, kMostAlpha, "tree_draw", "alpha");
  check_range(floor, 0.0, 1.0, "tree_draw", "floor");
  check_uniform(uniform, "tree_draw");
  check_ids(exclude, 0, tree.classes, "tree_draw", "exclude");
  const bool excludes = exclude.numel() > 0;
  const auto* exclude_data = exclude.const_data_ptr<int64_t>();
  require(!excludes || tree.classes > 1, "tree_draw: exclude must leave a class, and there is only one");

  Tensor ids = torch::stable::new_empty(uniform, {batch, draws}, ScalarType::Long);
  Tensor log_prob = torch::stable::new_empty(uniform, {batch, draws});
  auto* ids_data = ids.mutable_data_ptr<int64_t>();
  auto* log_prob_data = log_prob.mutable_data_ptr<double>();
  const auto* uniform_data = uniform.const_data_ptr<double>();
  torch::stable::parallel_for(0, batch, 1, [&](int64_t begin, int64_t end) {
    std::vector<Path> paths(draws);
    Example example{tree, nullptr, nullptr, -1, 0, alpha, floor, degree, whole_leaf, nullptr, nullptr, {}, {}, true};
    example.logits.resize(tree.leaf_size);
    example.scratch.resize(tree.sizes.size() + 1);
    for (int64_t row = begin; row < end; ++row) {
      example.query = query.const_data_ptr<float>() + row * tree.columns;
      example.features = features.const_data_ptr<float>() + row * tree.features;
      example.exclude = excludes ? exclude_data[row] : -1;
      example.excluded_value = excludes ? excluded_value.const_data_ptr<float>()[row] : 0;
      example.ids = ids_data + row * draws;
      example.log_prob = log_prob_data + row * draws;
      example.finite = true;
      for (int64_t slot = 0; slot < draws; ++slot) paths[slot] = {uniform_data[row * draws + slot], 1.0, slot};
      std::sort(paths.begin(), paths.end(), [](const Path& a, const Path& b) { return a.uniform < b.uniform; });
      example.root(top.const_data_ptr<float>() + row * tree.sizes[0], paths.data(), paths.data() + draws);
      if (!example.finite) std::fill(example.log_prob, example.log_prob + draws, NAN);
    }
  });
  return {ids, log_prob};
}

// Recomputes the sums of the given leaves, sorted and distinct, and of all nodes above them, for the quadratic kernel
// alpha·⟨h, w⟩² + 1. Old sums are not incremented, so there is no drift.
void tree_refresh_(const Tensor& sums, const Tensor& weight, std::vector<int64_t> sizes, int64_t leaf_size,
                   int64_t branching, const Tensor& leaves, double alpha) {
  const Tree tree(sums, weight, std::move(sizes), leaf_size, branching, "tree_refresh_");
  check(leaves, ScalarType::Long, 1, "tree_refresh_", "leaves");
  check_ascending(leaves, tree.sizes.back(), "tree_refresh_", "leaves");
  check_range(alpha, 0.0, kMostAlpha, "tree_refresh_", "alpha");
  const int64_t triangle = tree.columns * (tree.columns + 1) / 2;
  require(triangle < tree.features, "tree_refresh_: sums must have more than ", triangle, " columns, got ", tree.features);
  const auto *begin_leaf = leaves.const_data_ptr<int64_t>(), *end_leaf = begin_leaf + leaves.numel();
  auto* out = sums.mutable_data_ptr<float>();
  const auto diagonal = static_cast<float>(std::sqrt(alpha)), above = static_cast<float>(std::sqrt(2 * alpha));
  const int64_t per_top = tree.span[0] / leaf_size;

  // A thread sums a whole subtree of the first level, so that its sums stay in the cache.
  torch::stable::parallel_for(0, tree.sizes[0], 1, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> touched;
    std::vector<float> memory(leaf_size * (tree.columns + 31) + 16);
    auto* scratch = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
    for (int64_t top = begin; top < end; ++top) {
      const auto *from = std::lower_bound(begin_leaf, end_leaf, top * per_top),
                 *to = std::lower_bound(from, end_leaf, (top + 1) * per_top);
      touched.assign(from, to);
      size_t level = tree.sizes.size() - 1;
      for (int64_t leaf : touched) {
        float* sum = out + (tree.first[level] + leaf) * tree.features;
        const int64_t count = tree.count(level, leaf);
        sum_outer_products(tree.weight + leaf * leaf_size * tree.columns, count, tree.columns, scratch, sum);
        for (int64_t i = 0, at = 0; i < tree.columns; at += tree.columns - i, ++i) {
          sum[at] *= diagonal;
          for (int64_t l = 1; l < tree.columns - i; ++l) sum[at + l] *= above;
        }
        sum[triangle] = static_cast<float>(count);
        std::fill(sum + triangle + 1, sum + tree.features, 0.0f);
      }
      while (level-- > 0) {
        for (int64_t& node : touched) node /= branching;
        touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
        for (int64_t node : touched) {
          const int64_t start = node * branching, stop = std::min(start + branching, tree.sizes[level + 1]);
          sum_rows(tree.sum(level + 1, start), stop - start, tree.features,
                   out + (tree.first[level] + node) * tree.features);
        }
      }
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(manyclass, library) {
  library.def(
      "tree_draw(Tensor features, Tensor query, Tensor top, Tensor sums, Tensor weight, int[] sizes, int leaf_size, "
      "int branching, Tensor uniform, Tensor exclude, Tensor excluded_value, int degree, float alpha, float floor, "
      "bool whole_leaf) -> (Tensor, Tensor)");
  library.def(
      "tree_refresh_(Tensor(a!) sums, Tensor weight, int[] sizes, int leaf_size, int branching, Tensor leaves, "
      "float alpha) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(manyclass, CPU, library) {
  library.impl("tree_draw", TORCH_BOX(&tree_draw));
  library.impl("tree_refresh_", TORCH_BOX(&tree_refresh_));
}
