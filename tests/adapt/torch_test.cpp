// SPDX-License-Identifier: MIT
// Torch first: its CHECK and Catch2's clash, so the tests say REQUIRE.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "lamina/adapt/torch.hpp"

#include "accumulate.hpp"
#include "adapted.hpp"
#include "lamina/cuda/device_tensor.hpp"

namespace {

using namespace lamina_test;

template <class T>
constexpr at::ScalarType type_of = std::same_as<T, float> ? at::kFloat : at::kDouble;

template <class T>
at::Tensor tensor_of(const std::vector<T>& values, at::IntArrayRef shape) {
  at::Tensor tensor = at::empty(shape, type_of<T>);
  std::ranges::copy(values, tensor.data_ptr<T>());
  return tensor;
}

void require_refused(const at::Tensor& tensor, const std::string& sentence) {
  lamina_test::require_refused<float>(tensor, sentence);
}

// A CUDA tensor as far as torch knows: its memory is the host's, which nobody reads.
at::Tensor cuda_tensor(std::vector<float>& memory, at::IntArrayRef shape, at::ScalarType type,
                       at::OptionalIntArrayRef strides = c10::nullopt) {
  const at::Device device(at::kCUDA, 0);
  return at::for_blob(memory.data(), shape)
      .strides(strides)
      .options(at::TensorOptions().dtype(type).device(device))
      .target_device(device)
      .make_tensor();
}

}  // namespace

TEMPLATE_TEST_CASE("torch: a dense CPU tensor is a tensor where it lies", "", float, double) {
  const auto values = adapted_values<TestType>();
  at::Tensor tensor = tensor_of(values, {50, 100});
  require_tensor(tensor, tensor.template data_ptr<TestType>(), values);
  const std::vector<TestType> second(values.begin() + 100, values.begin() + 200);
  at::Tensor row = tensor[1];
  require_tensor(row, tensor.template data_ptr<TestType>() + 100, second);
  // A handle: also through a const one and an rvalue.
  const at::Tensor constant = tensor;
  lamina::writable_elements_of<TestType>(constant)[0] = 5;
  lamina::writable_elements_of<TestType>(tensor.view({-1}))[1] = 6;
  REQUIRE(tensor[0][0].template item<TestType>() == 5);
  REQUIRE(tensor[0][1].template item<TestType>() == 6);
}

TEST_CASE("torch: tensors without elements and of dimension 0 are tensors") {
  for (const at::Tensor& empty : {at::empty({0}), at::empty({3, 0, 2}), at::empty({0, 4}).t()}) {
    REQUIRE(lamina::elements_of<float>(empty).empty());
    REQUIRE(lamina::mean_abs{}(empty) == 0);
  }
  at::Tensor scalar = at::full({}, -3.0F);
  require_tensor(scalar, scalar.data_ptr<float>(), std::vector<float>{-3});
  // A dimension of 1 may have any stride.
  const at::Tensor column = at::ones({4, 3}).t()[0].unsqueeze(0).contiguous().t();
  REQUIRE(lamina::elements_of<float>(column).size() == 4);
}

TEST_CASE("torch: a parameter that requires a gradient is written in place, past autograd") {
  at::Tensor leaf = at::ones({4}).set_requires_grad(true);
  REQUIRE(c10::GradMode::is_enabled());
  std::ranges::fill(lamina::writable_elements_of<float>(leaf), 2.0F);
  REQUIRE(leaf.sum().item<float>() == 8);
  REQUIRE(leaf.requires_grad());
  REQUIRE(leaf.is_leaf());
  REQUIRE(lamina::mean_abs{}(leaf * 2) == 4);  // not a leaf
}

TEST_CASE("torch: what is no dense float or double CPU tensor is refused with what to call") {
  require_refused(at::Tensor(), "undefined");
  require_refused(at::ones({2, 4}).t(), ".contiguous()");
  require_refused(at::ones({4, 3}).select(1, 0), ".copy_()");
  require_refused(at::ones({4}).unsqueeze(1).expand({4, 2}), ".contiguous()");
  require_refused(at::ones({1, 2, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast), ".contiguous()");
  require_refused(at::ones({4}).to_sparse(), ".to_dense()");
  require_refused(at::ones({2, 2}).to_sparse_csr(), ".to_dense()");
  require_refused(at::_neg_view(at::ones({4})), ".resolve_neg()");
  require_refused(at::empty({4}, at::TensorOptions().device(at::kMeta)), "not on the CPU");
  for (const at::ScalarType type : {at::kInt, at::kLong, at::kBool, at::kComplexFloat}) {
    require_refused(at::zeros({4}, type), std::string("holds ") + at::toString(type));
    require_refused(at::zeros({4}, type), ".to(torch::kFloat)");
  }
  REQUIRE(lamina::elements_of<float>(at::_neg_view(at::ones({4})).resolve_neg())[0] == -1);
  const auto message = [](auto call) { return message_of<std::invalid_argument>(call); };
  REQUIRE(contains(message([] { (void)lamina::elements_of<float>(at::ones({4}, at::kHalf)); }),
                   "float asked for: pass a converted copy"));
  REQUIRE(contains(message([] { (void)lamina::writable_elements_of<double>(at::ones({4})); }),
                   "double asked for: pass a converted copy; to write into it, write into one "
                   "and copy that"));
}

TEMPLATE_TEST_CASE("torch: gradients may be Half or BFloat16", "", lamina::float16, lamina::bfloat16) {
  constexpr at::ScalarType type = std::same_as<TestType, lamina::float16> ? at::kHalf : at::kBFloat16;
  const at::Tensor wide = tensor_of(adapted_values<float>(), {50, 100});
  const at::Tensor half = wide.to(type);
  // What torch makes of the halves is what lamina makes of them.
  const at::Tensor back = half.to(at::kFloat);
  const auto values = lamina::elements_of<float>(back);
  const auto held = std::get<std::span<TestType>>(lamina::tensor_traits<at::Tensor>::elements(half));
  REQUIRE(held.data() == half.data_ptr());
  REQUIRE(held.size() == 5000);
  require_functors(half, std::vector<float>(values.begin(), values.end()));
  lamina::residual_accumulator<float> residual(model_of({5000}));
  REQUIRE(accumulate(residual, 0, half) == lamina::mean_abs{}(back));
  REQUIRE(same_bits(residual[0], values));
}

TEST_CASE("torch: a device takes dense CUDA tensors of each type where they lie, and the host refuses them") {
  using lamina::cuda::device_element;
  std::vector<float> memory(16);
  for (const auto& [type, expected] :
       {std::pair(at::kFloat, device_element::float32), std::pair(at::kDouble, device_element::float64),
        std::pair(at::kHalf, device_element::float16), std::pair(at::kBFloat16, device_element::bfloat16)}) {
    const at::Tensor tensor = cuda_tensor(memory, {2, 3}, type);
    const lamina::cuda::device_tensor taken(tensor);
    REQUIRE(taken.data() == memory.data());
    REQUIRE(taken.elements() == 6);
    REQUIRE(taken.type() == expected);
    REQUIRE(taken.is_writable());
    require_refused(tensor, ".cpu()");
  }
  const auto refused = [](const at::Tensor& tensor, const std::string& sentence) {
    const auto make = [&] { (void)lamina::cuda::device_tensor(tensor); };
    REQUIRE(contains(message_of<std::invalid_argument>(make), sentence));
  };
  refused(at::ones({4}), "is on cpu");
  refused(at::ones({4}), ".cuda()");
  refused(at::Tensor(), "undefined");
  refused(cuda_tensor(memory, {2, 3}, at::kFloat, at::IntArrayRef({1, 2})), ".contiguous()");
  refused(cuda_tensor(memory, {4}, at::kInt), "holds Int");
}

namespace {

// What a torch::nn::Module has that layout_of asks for.
struct module {
  struct item {
    std::string name;
    at::Tensor tensor;
    const std::string& key() const { return name; }
    const at::Tensor& value() const { return tensor; }
  };
  std::vector<item> named_parameters() const { return items; }
  std::vector<item> items;
};

}  // namespace

TEST_CASE("torch: a module is a layout, by itself and by what holds it") {
  const module of = {{{"weight", at::ones({4, 3})}, {"bias", at::ones({4})}}};
  const module* holder = &of;
  for (const lamina::layout& model : {lamina::layout_of(of), lamina::layout_of(holder)}) {
    REQUIRE(model.layers() == 2);
    REQUIRE(model[0].name == "weight");
    REQUIRE(model.sizes()[0] == 12);
    REQUIRE(model[1].name == "bias");
  }
  const auto undefined = [] { (void)lamina::layout_of(module{{{"none", at::Tensor()}}}); };
  REQUIRE(contains(message_of<std::invalid_argument>(undefined), "'none'"));
}

TEST_CASE("torch: gradients are handles, and undefined where there is none") {
  std::vector<at::Tensor> parameters = {at::ones({3}).set_requires_grad(true),
                                        at::ones({2}).set_requires_grad(true)};
  parameters[0].mutable_grad() = at::full({3}, 2.0F);
  const std::vector<at::Tensor> gradients = lamina::gradients_of(parameters);
  REQUIRE(gradients[0].data_ptr() == parameters[0].grad().data_ptr());
  REQUIRE(lamina::detail::has_value(gradients[0]));
  REQUIRE(lamina::detail::has_value(at::empty({0})));
  REQUIRE_FALSE(lamina::detail::has_value(gradients[1]));
}
