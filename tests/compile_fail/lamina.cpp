// SPDX-License-Identifier: MIT
#include <cstddef>
#include <list>
#include <span>
#include <utility>
#include <vector>

#include "cases.hpp"
#include "lamina/codec.hpp"
#include "lamina/worker.hpp"

struct unknown_tensor {
  const float* data;
  std::size_t count;
};

struct remote_tensor {
  std::vector<float> fetch() const { return {}; }
};
template <class T>
requires std::same_as<T, remote_tensor>
struct lamina::tensor_traits<T> {
  struct refusal {
    static_assert(sizeof(T) == 0, "my_tensor lies on another machine: call .fetch()");
  };
};

struct sum {
  float map(float x) const { return x; }
  // clang-format off
  LAMINA_REFUSED(float combine(float a, float b) const { return a + b; })
  LAMINA_WANTED(auto combine(auto a, auto b) const { return a + b; })
  // clang-format on
  double finish(double total, std::size_t) const { return total; }
};

int main() {
  const lamina::layout model({{"a", {3}}});
  const lamina::frame_view<float> frame;
  std::vector<float> floats(3);

  // clang-format off
  // EXPECT: { functor.combine(total, total) } -> std::same_as<double>;
  lamina::worker<float, sum> summing(model);
  summing.begin().add(0, floats);

  lamina::worker<float> worker(model);
  auto step = worker.add(std::vector<std::vector<float>>{{1, 2, 3}});
  step.select();
  // EXPECT: no member named
  LAMINA_REFUSED(worker.commit();) LAMINA_WANTED(step.commit();)
  // EXPECT: deleted
  auto other = LAMINA_REFUSED(step) LAMINA_WANTED(std::move(step));
  other.select();

  // EXPECT: lamina: a pointer does not tell how many elements it points to. Pass lamina::view(pointer, shape) or std::span(pointer, count)
  worker.begin().add(0, LAMINA_REFUSED(floats.data()) LAMINA_WANTED(lamina::view(floats.data(), {3})));
  const unknown_tensor unknown{};
  // EXPECT: lamina: not a tensor. Pass a contiguous range (std::span, std::vector, ...), include the adapter of your library from lamina/adapt/, or specialise lamina::tensor_traits for your type
  worker.begin().add(0, LAMINA_REFUSED(unknown) LAMINA_WANTED(std::span(unknown.data, unknown.count)));
  const remote_tensor remote{};
  // EXPECT: my_tensor lies on another machine: call .fetch()
  worker.begin().add(0, LAMINA_REFUSED(remote) LAMINA_WANTED(remote.fetch()));
  const std::vector<int> integers(3);
  // EXPECT: lamina: the elements are neither float nor double. Pass a copy in one of them, for example std::vector<float>(t.begin(), t.end())
  worker.begin().add(0, LAMINA_REFUSED(integers) LAMINA_WANTED(std::vector<float>(integers.begin(), integers.end())));
  const std::list<float> list(3);
  // EXPECT: lamina: the elements of this range do not lie in one piece of memory. Pass a contiguous copy, for example std::vector<float>(t.begin(), t.end())
  worker.begin().add(0, LAMINA_REFUSED(list) LAMINA_WANTED(std::vector<float>(list.begin(), list.end())));
  const std::vector<float*> pointers(1);
  // EXPECT: lamina: the elements are pointers or containers, not numbers. Pass the elements of one layer as one tensor, layer by layer
  worker.begin().add(0, LAMINA_REFUSED(pointers) LAMINA_WANTED(std::span(pointers[0], 3)));
  const std::vector<std::vector<float>> layers(1);
  // EXPECT: lamina: the elements are pointers or containers, not numbers. Pass the elements of one layer as one tensor, layer by layer
  worker.begin().add(0, LAMINA_REFUSED(layers) LAMINA_WANTED(layers[0]));

  std::vector<double> doubles(3);
  const std::vector<float> constant(3);
  // EXPECT: lamina: the tensor is const, or a view of const elements, and would be written to. Pass one that may be written
  frame.restore(0, LAMINA_REFUSED(constant) LAMINA_WANTED(floats));
  // EXPECT: lamina: the tensor is const, or a view of const elements, and would be written to. Pass one that may be written
  lamina::frame_view<double>().restore(0, std::span<LAMINA_REFUSED(const) double>(doubles));
  // EXPECT: lamina: the tensor's element type is not the one asked for. Pass a converted copy, or use the class (decode<double>, worker<double>, ...) of the tensor's type
  frame.restore(0, LAMINA_REFUSED(doubles) LAMINA_WANTED(floats));
  lamina::frame_encoder<float> encoder(model);
  // EXPECT: lamina: the callable gives each layer as a container of its own, which is gone before the frame is sent. Give a reference or a std::span
  encoder.encode({}, lamina::selection(model), [&](std::size_t l) LAMINA_WANTED(-> const auto&) { return layers[l]; });
  // clang-format on
}
