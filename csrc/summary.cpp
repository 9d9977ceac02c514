// Summaries of the nodes of the tree of blocks: the mean of the members, and their variance per column; codes of classes.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>

#include "codes.h"
#include "index.h"

namespace {

using namespace manyclass;

// Rows that are prefetched ahead of the one in use.
constexpr int64_t kAhead = 12;

// The class weights, and their codes.
struct Rows {
  const float *weight, *bias;
  int8_t* code;
  float* scale;
  int64_t classes, width, columns, stride;

  Rows(const Tensor& code_, const Tensor& code_scale, const Tensor& weight_, const Tensor& bias_, const char* op) {
    check(code_, ScalarType::Char, 2, op, "code");
    check(code_scale, ScalarType::Float, 1, op, "code_scale");
    check(weight_, ScalarType::Float, 2, op, "weight");
    check(bias_, ScalarType::Float, 1, op, "bias");
    const bool offsets = bias_.numel() > 0;
    classes = weight_.size(0), width = weight_.size(1), columns = width + offsets, stride = code_stride(columns);
    check_range<int64_t>(classes, 1, kMostClasses, op, "classes");
    require(columns > 0 && (!offsets || bias_.numel() == classes), op,
            ": weight must have a column, and bias one entry per class, or none");
    require(code_.size(0) == classes && code_.size(1) == stride && code_scale.numel() == classes, op,
            ": code must have ", stride, " columns, and one row and code_scale per class");
    weight = weight_.const_data_ptr<float>(), bias = offsets ? bias_.const_data_ptr<float>() : nullptr;
    code = code_.mutable_data_ptr<int8_t>(), scale = code_scale.mutable_data_ptr<float>();
  }

  void prefetch(int64_t id) const {
    prefetch_row(weight + id * width, width);
    for (int64_t i = 0; i < stride; i += 64) __builtin_prefetch(code + id * stride + i, 1);
    __builtin_prefetch(scale + id, 1);
  }

  // Writes the codes of a class, and its row with the offset.
  void encode(int64_t id, float* row) const {
    std::copy_n(weight + id * width, width, row);
    if (bias) row[width] = bias[id];
    scale[id] = encode_row(row, columns, code + id * stride);
  }
};

// The variance per column of vectors with this mean, whose squares sum up to `square` and whose number is `size`.
float spread_of(const std::vector<float>& mean, double square, double size) {
  double length = 0;
  for (const float value : mean) length += static_cast<double>(value) * value;
  return static_cast<float>(std::max(0.0, square / size - length) / static_cast<double>(mean.size()));
}

// mean: (nodes, stride), int8, mean_scale: (nodes,), spread: (nodes,): written for `blocks`, which are leaves, and for all
// nodes above them
// code: (num_classes, stride), int8, code_scale: (num_classes,): written for the classes of `blocks`
// weight: (num_classes, width)   bias: (num_classes,) or (0,), then columns = width + 1   order: (num_classes,), int32
void summarise_(const Tensor& mean, const Tensor& mean_scale, const Tensor& spread, const Tensor& code,
                const Tensor& code_scale, const Tensor& weight, const Tensor& bias, const Tensor& order,
                const Tensor& blocks, int64_t outliers, int64_t num_blocks, int64_t top) {
  const char* op = "summarise_";
  check(order, ScalarType::Int, 1, op, "order");
  check(blocks, ScalarType::Long, 1, op, "blocks");
  const Rows rows(code, code_scale, weight, bias, op);
  const int64_t classes = rows.classes, columns = rows.columns, stride = rows.stride;
  const Layout layout{classes, outliers, num_blocks};
  check_nodes(mean, mean_scale, spread, stride, op);
  check_layout(layout, top, mean.size(0), op);
  require(order.numel() == classes, op, ": order must name every class once");
  check_ascending(blocks, num_blocks, op, "blocks");
  const auto* block_data = blocks.const_data_ptr<int64_t>();
  const auto* order_data = order.const_data_ptr<int32_t>();
  auto* mean_data = mean.mutable_data_ptr<int8_t>();
  auto* scale_data = mean_scale.mutable_data_ptr<float>();
  auto* spread_data = spread.mutable_data_ptr<float>();
  const auto levels = levels_of(layout, top);

  std::atomic<bool> sound{true};  // exceptions must not leave a thread
  torch::stable::parallel_for(0, blocks.numel(), 32, [&](int64_t begin, int64_t end) {
    std::vector<float> row(columns), centre(columns);
    for (int64_t at = begin; at < end; ++at) {
      const int64_t block = block_data[at], first = layout.border(block), size = layout.size(block);
      const int32_t* ids = order_data + first;
      if (!within(ids, size, classes)) {
        sound = false;
        continue;
      }
      if (at + 1 < end) {  // the rows of the next block, while this one is summed up
        const int64_t next = layout.border(block_data[at + 1]), count = layout.size(block_data[at + 1]);
        for (int64_t j = 0; j < count; ++j) rows.prefetch(std::clamp<int64_t>(order_data[next + j], 0, classes - 1));
      }
      std::fill(centre.begin(), centre.end(), 0.0f);
      double square = 0;
      for (int64_t j = 0; j < size; ++j) {
        rows.encode(ids[j], row.data());
        square += add_row(row.data(), columns, centre.data());
      }
      for (float& value : centre) value /= static_cast<float>(size);
      const int64_t node = levels.back().first + block;
      spread_data[node] = spread_of(centre, square, static_cast<double>(size));
      scale_data[node] = encode_row(centre.data(), columns, mean_data + node * stride);
    }
  });
  require(sound, op, ": order must hold classes in [0, ", classes, ")");

  // Upwards, level by level: a node from its children.
  std::vector<int64_t> nodes(block_data, block_data + blocks.numel());
  for (size_t level = levels.size() - 1; level > 0; --level) {
    for (int64_t& node : nodes) node /= kBranching;
    nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
    const Level here = levels[level - 1], below = levels[level];
    torch::stable::parallel_for(0, static_cast<int64_t>(nodes.size()), 32, [&](int64_t begin, int64_t end) {
      std::vector<float> centre(columns);
      for (int64_t at = begin; at < end; ++at) {
        std::fill(centre.begin(), centre.end(), 0.0f);
        double square = 0, members = 0;
        for (int64_t child = kBranching * nodes[at]; child < kBranching * (nodes[at] + 1); ++child) {
          const auto size = static_cast<double>(node_border(layout, below.nodes, child + 1) -
                                                node_border(layout, below.nodes, child));
          const int64_t node = below.first + child;
          const double length = add_code(mean_data + node * stride, columns, scale_data[node], static_cast<float>(size),
                                         centre.data());
          members += size;
          square += size * (length + static_cast<double>(columns) * spread_data[node]);
        }
        for (float& value : centre) value /= static_cast<float>(members);
        const int64_t node = here.first + nodes[at];
        spread_data[node] = spread_of(centre, square, members);
        scale_data[node] = encode_row(centre.data(), columns, mean_data + node * stride);
      }
    });
  }
}

// Brings the codes of some classes up to date; `classes` is sorted and distinct.
void encode_(const Tensor& code, const Tensor& code_scale, const Tensor& weight, const Tensor& bias, const Tensor& classes) {
  const char* op = "encode_";
  check(classes, ScalarType::Long, 1, op, "classes");
  const Rows rows(code, code_scale, weight, bias, op);
  check_ascending(classes, rows.classes, op, "classes");
  const auto* ids = classes.const_data_ptr<int64_t>();
  torch::stable::parallel_for(0, classes.numel(), 256, [&](int64_t begin, int64_t end) {
    std::vector<float> row(rows.columns);
    for (int64_t at = begin; at < end; ++at) {
      if (at + kAhead < end) rows.prefetch(ids[at + kAhead]);
      rows.encode(ids[at], row.data());
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(manyclass, library) {
  library.def(
      "summarise_(Tensor(a!) mean, Tensor(b!) mean_scale, Tensor(c!) spread, Tensor(d!) code, Tensor(e!) code_scale, "
      "Tensor weight, Tensor bias, Tensor order, Tensor blocks, int outliers, int num_blocks, int top) -> ()");
  library.def("encode_(Tensor(a!) code, Tensor(b!) code_scale, Tensor weight, Tensor bias, Tensor classes) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(manyclass, CPU, library) {
  library.impl("summarise_", TORCH_BOX(&summarise_));
  library.impl("encode_", TORCH_BOX(&encode_));
}
