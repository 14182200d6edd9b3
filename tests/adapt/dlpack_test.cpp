// SPDX-License-Identifier: MIT
#include "lamina/adapt/dlpack.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "accumulate.hpp"
#include "adapted.hpp"

namespace {

using lamina_test::adapted_values;
using lamina_test::contains;

template <class T>
constexpr DLDataType type_of =
    std::same_as<T, lamina::bfloat16> ? DLDataType{kDLBfloat, 16, 1}
                                      : DLDataType{kDLFloat, static_cast<std::uint8_t>(8 * sizeof(T)), 1};

// A DLTensor with its shape and strides.
struct described {
  template <class T>
  described(std::vector<T>& memory, std::vector<std::int64_t> dimensions) : shape(std::move(dimensions)) {
    tensor.data = memory.data();
    tensor.device = {kDLCPU, 0};
    tensor.ndim = static_cast<int>(shape.size());
    tensor.dtype = type_of<T>;
    tensor.shape = shape.data();
    tensor.strides = nullptr;
    tensor.byte_offset = 0;
  }
  described(const described&) = delete;
  described& operator=(const described&) = delete;

  void set_strides(std::vector<std::int64_t> given) {
    strides = std::move(given);
    tensor.strides = strides.data();
  }

  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  DLTensor tensor{};
};

// Refused to read, to write, by the functors and by accumulate, with a message that holds `sentence`.
void require_refused(DLTensor& tensor, const std::string& sentence) {
  const auto refused = [&](auto call) {
    return contains(lamina_test::message_of<std::invalid_argument>(call), sentence);
  };
  lamina::residual_accumulator<float> residual(lamina_test::model_of({6}));
  REQUIRE(refused([&] { (void)lamina::elements_of<float>(tensor); }));
  REQUIRE(refused([&] { (void)lamina::writable_elements_of<float>(tensor); }));
  REQUIRE(refused([&] { lamina::mean_abs{}(tensor); }));
  REQUIRE(refused([&] { lamina_test::accumulate(residual, 0, tensor); }));
}

}  // namespace

TEMPLATE_TEST_CASE("dlpack: a contiguous tensor in host memory is a tensor where it lies", "", float,
                   double) {
  const auto values = adapted_values<TestType>();
  auto memory = values;
  described given(memory, {50, 100});
  for (const DLDeviceType device : {kDLCPU, kDLCUDAHost, kDLROCMHost}) {
    given.tensor.device.device_type = device;
    lamina_test::require_tensor(given.tensor, memory.data(), values);
  }
  given.set_strides({100, 1});
  lamina_test::require_tensor(given.tensor, memory.data(), values);

  DLManagedTensor managed{given.tensor, nullptr, nullptr};
  lamina_test::require_tensor(managed, memory.data(), values);
}

TEST_CASE("dlpack: elements begin at the byte offset") {
  auto memory = adapted_values<float>(20);
  const std::vector<float> rest(memory.begin() + 4, memory.begin() + 14);
  described given(memory, {2, 5});
  given.tensor.byte_offset = 16;
  lamina_test::require_readable(std::as_const(given.tensor), memory.data() + 4, rest);
  given.tensor.byte_offset = 2;
  require_refused(given.tensor, "a multiple of the 4 bytes");
}

TEST_CASE("dlpack: tensors without elements and of no dimension are tensors") {
  std::vector<float> memory = {-3, 1};
  described scalar(memory, {});
  scalar.tensor.shape = nullptr;
  CHECK(lamina::elements_of<float>(scalar.tensor).size() == 1);
  CHECK(lamina::mean_abs{}(scalar.tensor) == 3);
  described empty(memory, {3, 0, 2});
  empty.set_strides({7, 7, 7});
  empty.tensor.data = nullptr;
  CHECK(lamina::elements_of<float>(empty.tensor).empty());
  described ones(memory, {1, 2, 1});
  ones.set_strides({99, 1, 0});  // those of a dimension of 1 do not matter
  CHECK(lamina::elements_of<float>(ones.tensor).size() == 2);
}

TEST_CASE("dlpack: what is not contiguous in row-major order is refused") {
  std::vector<float> memory(24);
  described given(memory, {2, 3});
  for (const auto& strides :
       std::vector<std::vector<std::int64_t>>{{1, 2}, {6, 2}, {4, 1}, {0, 1}, {3, -1}}) {
    given.set_strides(strides);
    require_refused(given.tensor, "not contiguous");
  }
}

TEST_CASE("dlpack: other devices, types and broken shapes are refused") {
  std::vector<float> memory(6);
  described given(memory, {6});
  given.tensor.device.device_type = kDLCUDA;
  require_refused(given.tensor, "not in host memory (device type 2): copy it to the CPU");
  given.tensor.device.device_type = kDLCPU;

  given.tensor.dtype.lanes = 4;
  require_refused(given.tensor, "4 lanes");
  for (const DLDataType type :
       {DLDataType{kDLInt, 32, 1}, DLDataType{kDLUInt, 16, 1}, DLDataType{kDLFloat, 8, 1},
        DLDataType{kDLComplex, 64, 1}, DLDataType{kDLBfloat, 32, 1}}) {
    given.tensor.dtype = type;
    require_refused(given.tensor,
                    std::to_string(type.bits) + " bits of the type code " + std::to_string(type.code));
  }
  given.tensor.dtype = type_of<float>;

  given.shape[0] = -1;
  require_refused(given.tensor, "negative dimension");
  given.shape[0] = 6;
  given.tensor.ndim = -1;
  require_refused(given.tensor, "-1 dimensions");
  given.tensor.ndim = 1;
  given.tensor.shape = nullptr;
  require_refused(given.tensor, "no shape");
  given.tensor.shape = given.shape.data();
  given.tensor.data = nullptr;
  given.tensor.byte_offset = 64;
  require_refused(given.tensor, "null pointer");
  described huge(memory, {std::numeric_limits<std::int64_t>::max(), 4});
  require_refused(huge.tensor, "overflows");
  described beyond_signed(memory, {std::int64_t{1} << 62, 3});
  beyond_signed.set_strides({3, 1});
  require_refused(beyond_signed.tensor, "number of bytes of the shape overflows");
}

TEMPLATE_TEST_CASE("dlpack: gradients may be float16 or bfloat16", "", lamina::float16, lamina::bfloat16) {
  const auto wide = adapted_values<float>();
  std::vector<TestType> memory;
  std::vector<float> values;
  for (const float each : wide) {
    memory.push_back(lamina::saturating_round<TestType>(each));
    values.push_back(lamina::to_float(memory.back()));
  }
  described given(memory, {50, 100});
  lamina_test::require_functors(given.tensor, values);
  lamina::residual_accumulator<float> residual(lamina_test::model_of({5000}));
  lamina_test::accumulate(residual, 0, given.tensor);
  REQUIRE(lamina_test::same_bits(residual[0], values));
  const auto read = [&] { (void)lamina::elements_of<float>(given.tensor); };
  CHECK(contains(lamina_test::message_of<std::invalid_argument>(read),
                 "float asked for: pass a converted copy"));
}

TEST_CASE("dlpack: a const tensor is not written to") {
  std::vector<float> memory(6);
  described given(memory, {6});
  const DLTensor& constant = given.tensor;
  const auto write = [&] { (void)lamina::writable_elements_of<float>(constant); };
  CHECK(contains(lamina_test::message_of<std::invalid_argument>(write), "const"));
}

#if defined(DLPACK_MAJOR_VERSION) && DLPACK_MAJOR_VERSION >= 1
TEST_CASE("dlpack: a versioned tensor is read, and written unless it says that it is read only") {
  auto memory = adapted_values<float>();
  const auto values = memory;
  described given(memory, {50, 100});
  DLManagedTensorVersioned managed{};
  managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
  managed.dl_tensor = given.tensor;
  lamina_test::require_tensor(managed, memory.data(), values);

  managed.flags = DLPACK_FLAG_BITMASK_READ_ONLY;
  lamina_test::require_readable(std::as_const(managed), memory.data(), values);
  const auto write = [&] { (void)lamina::writable_elements_of<float>(managed); };
  CHECK(contains(lamina_test::message_of<std::invalid_argument>(write), "read only"));

  managed.version.major = DLPACK_MAJOR_VERSION + 1;
  const auto read = [&] { (void)lamina::elements_of<float>(managed); };
  CHECK(contains(lamina_test::message_of<std::invalid_argument>(read), "version"));
}
#endif
