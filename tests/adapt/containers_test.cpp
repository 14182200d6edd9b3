// SPDX-License-Identifier: MIT
// Tensors of others, and views of memory, are tensors where they lie; each third party where it is installed.
#include <deque>

#include "adapted.hpp"
#include "lamina/adapt/mdspan.hpp"
#include "mdspan.hpp"

#if __has_include(<mdspan>)
#include <mdspan>
#endif
#if __has_include(<dlpack/dlpack.h>)
#include "lamina/adapt/dlpack.hpp"
#endif
#if __has_include(<Eigen/Core>)
#include <Eigen/Core>

#include "lamina/adapt/eigen.hpp"
#endif
#if __has_include(<xtensor/xarray.hpp>) || __has_include(<xtensor/containers/xarray.hpp>)
#include "lamina/adapt/xtensor.hpp"
#include "xtensor_headers.hpp"
#endif

using namespace lamina_test;

// The example in the comment of tensor.hpp, word for word: CMakeLists.txt takes it from there.
#include "documented_tensor.inc"

TEST_CASE("own tensor: the specialisation that tensor.hpp documents works as it stands there") {
  auto memory = adapted_values<float>();
  const auto values = memory;
  my_tensor tensor{memory.data(), memory.size()};
  require_tensor(tensor, memory.data(), values);
}

namespace {

struct of_other_references : mdspan<float> {
  using reference = float;
};

static_assert(lamina::tensor<mdspan<float>> && lamina::tensor<const mdspan<const double>>);
static_assert(!lamina::tensor<of_other_references>);

}  // namespace

TEMPLATE_TEST_CASE("mdspan: what has no gaps is a tensor where it lies", "", float, double) {
  auto memory = adapted_values<TestType>();
  const auto values = memory;
  mdspan<TestType> rows(memory.data(), 50, 100);
  require_tensor(rows, memory.data(), values);
  mdspan<TestType> columns(memory.data(), {{50, 100}, {1, 50}});
  require_tensor(columns, memory.data(), values);
  require_readable(mdspan<const TestType>(memory.data(), 50, 100), memory.data(), values);
  lamina::writable_elements_of<TestType>(mdspan<TestType>(memory.data(), 50, 100))[7] = 3;
  REQUIRE(memory[7] == 3);
  REQUIRE(lamina::elements_of<TestType>(mdspan<TestType>(nullptr, 0, 3)).empty());
}

TEST_CASE("mdspan: what has gaps, or an element twice, is refused with what to pass") {
  std::vector<float> memory(64);
  for (const mdspan<float>& each :
       {mdspan<float>(memory.data(), {{2, 3}, {4, 1}}), mdspan<float>(memory.data(), {{2, 3}, {3, 2}}),
        mdspan<float>(memory.data(), {{4, 4}, {0, 1}}), mdspan<float>(memory.data(), {{2, 3}, {5, 0}})}) {
    require_refused<float>(each, "a contiguous copy", "without gaps");
  }
}

#if defined(__cpp_lib_mdspan)
TEST_CASE("mdspan: that of the standard library") {
  auto memory = adapted_values<float>();
  const auto values = memory;
  std::mdspan rows(memory.data(), 50, 100);
  require_tensor(rows, memory.data(), values);
  const std::layout_stride::mapping gaps(std::extents(2, 3), std::array{4, 1});
  const std::mdspan wide(memory.data(), gaps);
  REQUIRE_THROWS_AS(lamina::elements_of<float>(wide), std::invalid_argument);
  std::mdspan<float, std::extents<std::size_t>> scalar(memory.data());
  REQUIRE(lamina::elements_of<float>(scalar).size() == 1);
}
#endif

#if __has_include(<dlpack/dlpack.h>)
namespace {

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

}  // namespace

TEMPLATE_TEST_CASE("dlpack: what is contiguous in host memory is a tensor", "", float, double) {
  const auto values = adapted_values<TestType>();
  auto memory = values;
  described given(memory, {50, 100});
  for (const DLDeviceType device : {kDLCPU, kDLCUDAHost, kDLROCMHost}) {
    given.tensor.device.device_type = device;
    require_tensor(given.tensor, memory.data(), values);
  }
  given.set_strides({100, 1});
  require_tensor(given.tensor, memory.data(), values);

  DLManagedTensor managed{given.tensor, nullptr, nullptr};
  require_tensor(managed, memory.data(), values);
}

TEST_CASE("dlpack: elements begin at the byte offset, and those of a const tensor are not written to") {
  auto memory = adapted_values<float>(20);
  const std::vector<float> rest(memory.begin() + 4, memory.begin() + 14);
  described given(memory, {2, 5});
  given.tensor.byte_offset = 16;
  const DLTensor& constant = given.tensor;
  require_readable(constant, memory.data() + 4, rest);
  const auto write = [&] { (void)lamina::writable_elements_of<float>(constant); };
  CHECK(contains(message_of<std::invalid_argument>(write), "const"));
  given.tensor.byte_offset = 2;
  require_refused<float>(given.tensor, "a multiple of the 4 bytes");
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
    require_refused<float>(given.tensor, "not contiguous");
  }
}

TEST_CASE("dlpack: other devices, types and broken shapes are refused") {
  std::vector<float> memory(6);
  const auto refused = [&](const std::string& sentence, const auto& breaks) {
    described given(memory, {6});
    breaks(given);
    require_refused<float>(given.tensor, sentence);
  };
  refused("not in host memory (device type 2): copy it to the CPU",
          [](described& it) { it.tensor.device.device_type = kDLCUDA; });
  refused("4 lanes", [](described& it) { it.tensor.dtype.lanes = 4; });
  for (const DLDataType type :
       {DLDataType{kDLInt, 32, 1}, DLDataType{kDLUInt, 16, 1}, DLDataType{kDLFloat, 8, 1},
        DLDataType{kDLComplex, 64, 1}, DLDataType{kDLBfloat, 32, 1}}) {
    refused(std::to_string(type.bits) + " bits of the type code " + std::to_string(type.code),
            [&](described& it) { it.tensor.dtype = type; });
  }
  refused("negative dimension", [](described& it) { it.shape[0] = -1; });
  refused("-1 dimensions", [](described& it) { it.tensor.ndim = -1; });
  refused("no shape", [](described& it) { it.tensor.shape = nullptr; });
  refused("null pointer", [](described& it) {
    it.tensor.data = nullptr;
    it.tensor.byte_offset = 64;
  });
  described huge(memory, {std::numeric_limits<std::int64_t>::max(), 4});
  require_refused<float>(huge.tensor, "overflows");
  described beyond_signed(memory, {std::int64_t{1} << 62, 3});
  beyond_signed.set_strides({3, 1});
  require_refused<float>(beyond_signed.tensor, "number of bytes of the shape overflows");
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
  require_functors(given.tensor, values);
  lamina::residual_accumulator<float> residual(model_of({5000}));
  accumulate(residual, 0, given.tensor);
  REQUIRE(same_bits(residual[0], values));
}

#if defined(DLPACK_MAJOR_VERSION) && DLPACK_MAJOR_VERSION >= 1
TEST_CASE("dlpack: a versioned tensor is read, and written unless it says that it is read only") {
  auto memory = adapted_values<float>();
  const auto values = memory;
  described given(memory, {50, 100});
  DLManagedTensorVersioned managed{};
  managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
  managed.dl_tensor = given.tensor;
  require_tensor(managed, memory.data(), values);
  managed.flags = DLPACK_FLAG_BITMASK_READ_ONLY;
  require_readable(std::as_const(managed), memory.data(), values);
  const auto write = [&] { (void)lamina::writable_elements_of<float>(managed); };
  CHECK(contains(message_of<std::invalid_argument>(write), "read only"));
  managed.version.major = DLPACK_MAJOR_VERSION + 1;
  const auto read = [&] { (void)lamina::elements_of<float>(managed); };
  CHECK(contains(message_of<std::invalid_argument>(read), "version"));
}
#endif
#endif

#if __has_include(<Eigen/Core>)
namespace {

template <class T, int Order>
using matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Order>;
template <class T>
using vector = Eigen::Matrix<T, Eigen::Dynamic, 1>;

template <class Tensor, class T>
void require_filled(Tensor tensor, const std::vector<T>& values) {
  std::ranges::copy(values, tensor.data());
  require_tensor(tensor, tensor.data(), values);
}

}  // namespace

TEMPLATE_TEST_CASE("eigen: matrices and arrays are tensors where they lie", "", float, double) {
  const auto values = adapted_values<TestType>();
  require_filled(matrix<TestType, Eigen::ColMajor>(50, 100), values);
  require_filled(matrix<TestType, Eigen::RowMajor>(50, 100), values);
  require_filled(vector<TestType>(5000), values);
  require_filled(Eigen::Array<TestType, Eigen::Dynamic, Eigen::Dynamic>(50, 100), values);
  require_filled(Eigen::Array<TestType, 1, Eigen::Dynamic>(5000), values);
  const auto twelve = adapted_values<TestType>(12);
  require_filled(Eigen::Matrix<TestType, 3, 4>(), twelve);
  require_filled(Eigen::Matrix<TestType, 3, 4, Eigen::RowMajor>(), twelve);
  require_filled(Eigen::Array<TestType, 12, 1>(), twelve);
  require_filled(Eigen::Matrix<TestType, Eigen::Dynamic, 4, 0, 8, 4>(3, 4), twelve);
  REQUIRE(lamina::elements_of<TestType>(matrix<TestType, 0>(0, 3)).empty());
  REQUIRE(lamina::mean_abs{}(Eigen::Matrix<TestType, 0, 0>()) == 0);
}

TEMPLATE_TEST_CASE("eigen: maps and refs are tensors where they lie, const ones to read", "", float, double) {
  auto memory = adapted_values<TestType>();
  const auto values = memory;
  using mapped = matrix<TestType, Eigen::ColMajor>;
  Eigen::Map<mapped> map(memory.data(), 50, 100);
  require_tensor(map, memory.data(), values);
  Eigen::Map<mapped, 0, Eigen::OuterStride<>> dense(memory.data(), 50, 100, Eigen::OuterStride<>(50));
  require_tensor(dense, memory.data(), values);
  Eigen::Ref<mapped> ref(map);
  require_tensor(ref, memory.data(), values);
  vector<TestType> owner = Eigen::Map<const vector<TestType>>(values.data(), 5000);
  Eigen::Ref<vector<TestType>> vector_ref(owner);
  require_tensor(vector_ref, owner.data(), values);
  require_readable(Eigen::Map<const mapped>(values.data(), 50, 100), values.data(), values);
  const Eigen::Ref<const mapped> constant(map);
  require_readable(constant, memory.data(), values);
  // Views, hence also as rvalues.
  lamina::writable_elements_of<TestType>(Eigen::Map<mapped>(memory.data(), 50, 100))[7] = 3;
  REQUIRE(memory[7] == 3);
}

TEST_CASE("eigen: what has no gaps is a tensor even as a block, transpose or view of another") {
  Eigen::MatrixXd m = Eigen::MatrixXd::Random(4, 6);
  const auto readable = [&](const auto& tensor, std::ptrdiff_t begin, std::ptrdiff_t end) {
    require_readable(tensor, m.data() + begin, std::vector<double>(m.data() + begin, m.data() + end));
  };
  readable(m.col(1), 4, 8);
  readable(std::as_const(m).middleCols(1, 5), 4, 24);
  readable(m.transpose(), 0, 24);
  readable(m.array(), 0, 24);
  readable(m.reshaped(), 0, 24);
  readable(m.col(1).segment(1, 2), 5, 7);
  readable(m.block(2, 3, 1, 1), 14, 15);
  // The stride of a dimension of 1 does not count.
  using strides = Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>;
  readable(Eigen::Map<Eigen::MatrixXd, 0, strides>(m.data(), 1, 6, strides(1, 3)), 0, 6);
  auto column = m.col(2);
  require_tensor(column, m.data() + 8, std::vector<double>(m.data() + 8, m.data() + 12));

  // Gaps that are known at run time are refused with what to write.
  const auto refused = [](auto&& tensor) {
    require_refused<double>(tensor, ".eval()", "write into an Eigen::Matrix");
  };
  refused(m.row(1));
  refused(m.block(1, 1, 2, 2));
  refused(m.transpose().col(0));
  refused(m.diagonal());
  refused(Eigen::Ref<Eigen::MatrixXd>(m.topRows(2)));
  refused(Eigen::Map<Eigen::MatrixXd, 0, Eigen::OuterStride<>>(m.data(), 3, 4, Eigen::OuterStride<>(6)));
  refused(Eigen::Map<Eigen::VectorXd, 0, Eigen::InnerStride<>>(m.data(), 3, Eigen::InnerStride<>(2)));
  CHECK(lamina::elements_of<double>(m.row(1).eval()).size() == 6);
}

TEST_CASE("eigen: expressions, and gaps that are known at compile time, are no tensors") {
  const Eigen::MatrixXf m = Eigen::MatrixXf::Random(4, 6);
  const Eigen::Matrix4f fixed = Eigen::Matrix4f::Random();
  static_assert(!lamina::tensor<decltype(2 * m + m)> && !lamina::tensor<decltype(m * m.transpose())>);
  static_assert(!lamina::tensor<decltype(m.cast<double>())> &&
                !lamina::tensor<decltype(Eigen::MatrixXf::Zero(1, 1))>);
  static_assert(!lamina::tensor<decltype(fixed.row(1))> && lamina::tensor<decltype(fixed.col(1))>);
  static_assert(!lamina::tensor<decltype(fixed.topLeftCorner<2, 2>())>);
  static_assert(lamina::tensor<decltype(fixed.leftCols<2>())>);
  static_assert(!lamina::tensor<Eigen::Map<Eigen::Vector3f, 0, Eigen::InnerStride<2>>>);
  static_assert(!lamina::tensor<Eigen::DiagonalMatrix<float, 3>>);
  REQUIRE(lamina::mean_abs{}((2 * m + m).eval()) > 0);
  REQUIRE(lamina::mean_abs{}(fixed.row(1).eval()) > 0);
}
#endif

#if __has_include(<xtensor/xarray.hpp>) || __has_include(<xtensor/containers/xarray.hpp>)
namespace {

using xt::layout_type;

constexpr std::size_t rows = 50;
constexpr std::size_t columns = 100;

template <class Tensor, class T>
Tensor filled(const std::vector<T>& values) {
  Tensor tensor(typename Tensor::shape_type{rows, columns});
  std::ranges::copy(values, tensor.data());
  return tensor;
}

}  // namespace

TEMPLATE_TEST_CASE("xtensor: containers are tensors where they lie", "", float, double) {
  const auto values = adapted_values<TestType>();
  const auto check = [&](auto tensor) { require_tensor(tensor, tensor.data(), values); };
  check(filled<xt::xarray<TestType>>(values));
  check(filled<xt::xtensor<TestType, 2>>(values));
  check(filled<xt::xarray<TestType, layout_type::column_major>>(values));
  check(filled<xt::xtensor<TestType, 2, layout_type::column_major>>(values));
  xt::xtensor_fixed<TestType, xt::xshape<rows, columns>> fixed;
  std::ranges::copy(values, fixed.data());
  require_tensor(fixed, fixed.data(), values);
}

TEMPLATE_TEST_CASE("xtensor: adapted memory is a tensor, const memory to read", "", float, double) {
  auto memory = adapted_values<TestType>();
  const auto values = memory;
  const std::array<std::size_t, 2> shape = {rows, columns};
  auto vector = xt::adapt(memory, shape);
  require_tensor(vector, memory.data(), values);
  auto dynamic_rank = xt::adapt(memory, std::vector<std::size_t>{rows, columns});
  require_tensor(dynamic_rank, memory.data(), values);
  auto pointer = xt::adapt(memory.data(), memory.size(), xt::no_ownership(), shape);
  require_tensor(pointer, memory.data(), values);
  const auto constant = xt::adapt(values, shape);
  require_readable(constant, values.data(), values);
}

TEST_CASE("xtensor: strides known at run time must be dense") {
  using dynamic = xt::xarray<float, layout_type::dynamic>;
  const auto values = adapted_values<float>(6);
  for (const layout_type order : {layout_type::row_major, layout_type::column_major}) {
    dynamic tensor(dynamic::shape_type{2, 3}, order);
    std::ranges::copy(values, tensor.data());
    require_tensor(tensor, tensor.data(), values);
  }
  // A dimension of 1 has stride 0 in xtensor.
  dynamic column(dynamic::shape_type{6, 1}, layout_type::row_major);
  std::ranges::copy(values, column.data());
  require_tensor(column, column.data(), values);

  const xt::xarray<float> empty = xt::zeros<float>({std::size_t{3}, std::size_t{0}});
  CHECK(lamina::elements_of<float>(empty).empty());
  const xt::xarray<float> scalar = -3.0F;
  CHECK(lamina::mean_abs{}(scalar) == 3);

  const auto memory = adapted_values<float>(12);
  const auto strided = [&](std::vector<std::size_t> shape, std::vector<std::ptrdiff_t> strides) {
    return xt::adapt(memory, shape, strides);
  };
  require_readable(strided({3, 4}, {4, 1}), memory.data(), memory);
  require_readable(strided({3, 4}, {1, 3}), memory.data(), memory);
  for (const auto& gaps : {strided({2, 3}, {4, 1}), strided({2, 3}, {1, 4}), strided({3, 2}, {4, 2}),
                           strided({4, 3}, {0, 1}), strided({2, 2, 2}, {2, 4, 1})}) {
    const auto read = [&] { (void)lamina::elements_of<float>(gaps); };
    REQUIRE(contains(message_of<std::invalid_argument>(read), "assign it to an xt::xarray"));
    REQUIRE_THROWS_AS(lamina::mean_abs{}(gaps), std::invalid_argument);
  }
}

static_assert(!lamina::tensor<decltype(xt::transpose(std::declval<const xt::xtensor<float, 1>&>()))>);
// A container whose memory is in blocks.
static_assert(!lamina::tensor<
              xt::xarray_container<std::deque<float>, layout_type::row_major, std::vector<std::size_t>>>);
#endif
