// SPDX-License-Identifier: MIT
#pragma once

#include <initializer_list>
#include <variant>

#include "lamina/fwd.hpp"
#include "lamina/half.hpp"
#include "lamina/layout.hpp"

/// What counts as a tensor: anything whose elements lie in one contiguous piece of memory. Read this first.
///
/// std::span, std::vector, std::array and every other contiguous range work as they are; a raw pointer, by `lamina::view(pointer, shape)`.
/// xtensor, Eigen and torch have adapters in lamina/adapt/. Any other type is taught by one short specialisation of tensor_traits:
///
///     struct my_tensor {
///       float* data;
///       std::size_t count;
///     };
///     template <>
///     struct lamina::tensor_traits<my_tensor> {
///       static auto elements(const my_tensor& t) { return std::span<const float>(t.data, t.count); }
///       static auto elements(my_tensor& t) { return std::span<float>(t.data, t.count); }  // to write
///     };
///
/// A type that knows its element type only at run time returns a std::variant of spans (see adapt/torch.hpp). A type that may be without
/// elements, as a std::optional, has `static bool has_value(const my_tensor&)`: where it says false, worker::add takes the layer for one
/// without a gradient in this step, and everything else throws as `elements` does.
namespace lamina::inline LAMINA_ABI {

namespace detail {

template <class Range>
concept some_range = std::is_array_v<std::remove_reference_t<Range>> || requires(Range& range) {
  range.begin();
  range.end();
};

// Tensors, or layers, that are counted and indexed.
template <class Tensors>
concept indexed = requires(Tensors& tensors, std::ptrdiff_t index) {
  std::size(tensors);
  std::begin(tensors)[index];
};

template <class... Words>
[[noreturn]] void refuse_tensor(const Words&... words) {
  refuse(words...);
}

// Whether the strides are those of a tensor without gaps whose last of `rank` dimensions is the innermost one. A dimension of 1 may
// have any stride. For tensors that have elements.
template <class ExtentOf, class StrideOf>
constexpr bool is_dense(std::size_t rank, const ExtentOf& extent_of, const StrideOf& stride_of) {
  std::size_t expected = 1;
  for (std::size_t d = rank; d-- > 0;) {
    const auto extent = static_cast<std::size_t>(extent_of(d));
    if (extent != 1 && !std::cmp_equal(stride_of(d), expected)) return false;
    expected *= extent;
  }
  return true;
}

// Told by its members, and visited through argument-dependent lookup: only who has a std::variant includes its header.
template <class Elements>
inline constexpr bool is_variant = requires(const Elements& each) {
  each.index();
  each.valueless_by_exception();
};

/// Whether the tensor has elements to give: true unless its tensor_traits say otherwise.
template <class Tensor>
bool has_value([[maybe_unused]] const Tensor& tensor) {
  using traits = tensor_traits<std::remove_cv_t<Tensor>>;
  if constexpr (requires { traits::has_value(tensor); }) return traits::has_value(tensor);
  return true;
}

}  // namespace detail

/// The one customisation point: `elements(tensor)` gives the span, or a std::variant of spans, over the elements, without a copy. This
/// definition serves every contiguous, sized range; specialisations serve other types. A partial one for types that are no tensors may
/// have, instead of `elements`, a nested struct `refusal` with a static_assert whose sentence says what to write instead (see
/// adapt/eigen.hpp).
template <class Tensor>
struct tensor_traits {
  // Told by what std::span takes, since <ranges> costs more than the rest of this header. From begin() and not from data(): that of an
  // xtensor view gives the beginning of what it is a view of.
  template <class Range>
  requires requires(Range& range) { std::span(range); }
  static auto elements(Range& range) { return std::span(std::begin(range), std::span(range).size()); }
};

/// True for the types that tensor_traits knows.
template <class Tensor>
concept tensor = requires(Tensor& each) {
  tensor_traits<std::remove_cvref_t<Tensor>>::elements(each);
};

/// A tensor that may not be there: no gradient in this step. `elements` of an empty one throws std::invalid_argument.
template <tensor Tensor>
struct tensor_traits<std::optional<Tensor>> {
  template <class Self>
  requires tensor<decltype(*std::declval<Self&>())>
  static auto elements(Self& each) {
    if (!each) detail::refuse_tensor("there is no tensor: the std::optional is empty");
    return tensor_traits<std::remove_cv_t<Tensor>>::elements(*each);
  }
  static bool has_value(const std::optional<Tensor>& each) { return each && detail::has_value(*each); }
};

namespace detail {

// For a static_assert that fails only where its template is used.
template <class...>
inline constexpr bool never = false;

// Fails to compile, with a sentence that says what to write instead, unless `Tensor` is a tensor. The deduced
// return type has the compiler look into it where it is called, before it stumbles over what follows there.
template <class Tensor>
constexpr auto require_tensor() {
  using bare = std::remove_cvref_t<Tensor>;
  if constexpr (tensor<Tensor>) {
    using elements = std::remove_cvref_t<decltype(tensor_traits<bare>::elements(std::declval<Tensor&>()))>;
    if constexpr (!is_variant<elements>) {
      using value = std::remove_cv_t<typename elements::element_type>;
      static_assert(
          !std::is_pointer_v<value> && !some_range<value>,
          "lamina: the elements are pointers or containers, not numbers. Pass the elements of one layer as "
          "one tensor, layer by layer");
      static_assert(
          !std::is_arithmetic_v<value> || element<value>,
          "lamina: the elements are neither float nor double. Pass a copy in one of them, for example "
          "std::vector<float>(t.begin(), t.end())");
    }
  } else if constexpr (requires { typename tensor_traits<bare>::refusal; }) {
    static_assert(std::is_empty_v<typename tensor_traits<bare>::refusal>);  // instantiates it
  } else if constexpr (std::is_pointer_v<bare>) {
    static_assert(
        never<Tensor>,
        "lamina: a pointer does not tell how many elements it points to. Pass lamina::view(pointer, shape) "
        "or std::span(pointer, count)");
  } else if constexpr (some_range<Tensor>) {
    static_assert(
        never<Tensor>,
        "lamina: the elements of this range do not lie in one piece of memory. Pass a contiguous copy, for "
        "example std::vector<float>(t.begin(), t.end())");
  } else {
    static_assert(
        never<Tensor>,
        "lamina: not a tensor. Pass a contiguous range (std::span, std::vector, ...), include the adapter of "
        "your library from lamina/adapt/, or specialise lamina::tensor_traits for your type");
  }
}

template <class T, class Elements>
std::span<T> narrow_to(const Elements& elements) {
  if constexpr (is_variant<Elements>) {
    return visit(
        []<class Span>(Span span) -> std::span<T> {
          if constexpr (std::is_convertible_v<Span, std::span<T>>) {
            return span;
          } else if constexpr (std::is_convertible_v<Span, std::span<const T>>) {
            refuse_tensor("the tensor is const, or a view of const elements, and would be written to");
          } else {
            refuse_tensor(
                "the tensor holds another element type at run time than the ",
                sizeof(T) == 4 ? "float" : "double",
                " asked for: pass a converted copy; to write into it, write into one and copy that");
          }
        },
        elements);
  } else if constexpr (std::is_convertible_v<Elements, std::span<T>>) {
    return elements;
  } else {
    using given = typename Elements::element_type;
    static_assert(std::is_const_v<T> || !std::is_const_v<given>,
                  "lamina: the tensor is const, or a view of const elements, and would be written to. Pass "
                  "one that may "
                  "be written");
    static_assert(
        std::same_as<std::remove_cv_t<T>, std::remove_cv_t<given>>,
        "lamina: the tensor's element type is not the one asked for. Pass a converted copy, or use the class "
        "(decode<double>, worker<double>, ...) of the tensor's type");
    return {};
  }
}

template <class T, class Tensor>
std::span<T> elements_as(Tensor& tensor) {
  require_tensor<Tensor>();
  if constexpr (lamina::tensor<Tensor>) {
    return narrow_to<T>(tensor_traits<std::remove_const_t<Tensor>>::elements(tensor));
  } else {
    return {};
  }
}

/// What a residual of T can add: T itself and the half-width types.
template <class G, class T>
concept addable_to = std::same_as<G, T> || half_element<G>;

/// Calls visitor(std::span<G>) for the elements of a tensor, whatever G of the addable ones it holds: of const G, unless they are to be
/// written. Throws std::invalid_argument for one that holds another type at run time.
template <element T, bool IsWritten, class Tensor, class Visitor>
void visit_elements(Tensor&& tensor, const Visitor& visitor) {
  require_tensor<Tensor>();
  const auto elements = tensor_traits<std::remove_cvref_t<Tensor>>::elements(tensor);
  using seen = std::remove_const_t<decltype(elements)>;
  const auto visit_one = [&](auto span) {
    using given = typename decltype(span)::element_type;
    using G = std::conditional_t<IsWritten, given, std::remove_const_t<given>>;
    if constexpr (addable_to<G, T>) {
      visitor(std::span<std::conditional_t<IsWritten, G, const G>>(span));
    } else {
      static_assert(is_variant<seen> || never<given>,
                    "lamina: the tensor's element type is neither the residual's, nor lamina::float16 or "
                    "lamina::bfloat16, or it is const and would be written to");
      refuse_tensor(
          "the tensor holds another element type at run time than the residual: pass a converted copy");
    }
  };
  if constexpr (is_variant<seen>) {
    visit(visit_one, elements);
  } else {
    visit_one(elements);
  }
}
/// A gradient, to read.
template <element T, class Tensor, class Visitor>
void visit_gradient(const Tensor& gradient, const Visitor& visitor) {
  visit_elements<T, false>(gradient, visitor);
}

/// A finite number as a half: the nearest, and the largest where it is beyond the range. NaN stays NaN.
template <half_element Half, element T>
constexpr Half to_nearest(T x) noexcept {
  constexpr T largest = (std::numeric_limits<float>::max)();
  if (is_nan(static_cast<double>(x))) return Half{0x7fff};
  return saturating_round<Half>(static_cast<float>(x < -largest ? -largest : x > largest ? largest : x));
}

}  // namespace detail

/// The tensor of product(shape) elements that begin at `pointer`; a shape, a range of integers, of {} is one element. Nothing is owned or
/// copied. Throws std::invalid_argument for a negative dimension, a product that overflows, or a null pointer to more than 0 elements.
template <class T, detail::some_range Shape>
requires std::integral<std::remove_cvref_t<decltype(*std::begin(std::declval<const Shape&>()))>>
[[nodiscard]] constexpr std::span<T> view(T* pointer, const Shape& shape) {
  const std::size_t count = detail::product_of(shape);
  if (count > (std::numeric_limits<std::size_t>::max)() / sizeof(T))
    detail::refuse_tensor("the number of bytes of the shape overflows");
  if (pointer == nullptr && count > 0)
    detail::refuse_tensor("a null pointer where the shape has ", count, " elements");
  return {pointer, count};
}
template <class T>
[[nodiscard]] constexpr std::span<T> view(T* pointer, std::initializer_list<std::size_t> shape) {
  return view(pointer, std::span(shape.begin(), shape.size()));
}

/// The elements of `tensor` to read, as T. A type that is known only at run time and is not T throws
/// std::invalid_argument; one that is known at compile time and is not T does not compile.
template <element T, class Tensor>
[[nodiscard]] std::span<const T> elements_of(const Tensor& tensor) {
  return detail::elements_as<const T>(tensor);
}

/// The elements of `tensor` to write; errors as above, and a const tensor does not compile. A view
/// (std::span, a framework's tensor handle) may be passed as an rvalue.
template <element T, class Tensor>
[[nodiscard]] std::span<T> writable_elements_of(Tensor&& tensor) {
  return detail::elements_as<T>(tensor);
}

/// A tensor of any type as a gradient of T: the elements where they lie, of T, float16 or bfloat16. For a list of tensors of
/// several types; owns nothing. One that is not there, as an empty std::optional, is a layer without a gradient.
template <element T>
struct tensor_ref {
  /// Throws std::invalid_argument for a tensor that holds another element type at run time.
  template <class Tensor>
  requires(!std::same_as<std::remove_cvref_t<Tensor>, tensor_ref>) tensor_ref(const Tensor& tensor) {
    if (detail::has_value(tensor)) detail::visit_gradient<T>(tensor, [this](auto each) { elements = each; });
  }

  std::optional<std::variant<std::span<const T>, std::span<const float16>, std::span<const bfloat16>>>
      elements;
};

template <element T>
struct tensor_traits<tensor_ref<T>> {
  static const auto& elements(const tensor_ref<T>& each) { return *each.elements; }
  static bool has_value(const tensor_ref<T>& each) { return each.elements.has_value(); }
};

}  // namespace lamina::inline LAMINA_ABI
