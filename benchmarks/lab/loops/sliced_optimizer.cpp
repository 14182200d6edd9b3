// SPDX-License-Identifier: MIT
#include "loops/sliced_optimizer.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "loops/server.hpp"
#include "messages/link.hpp"

namespace lab {
namespace {

lamina::layout sliced(const lamina::layout& model, const owned_ranges& own) {
  std::vector<lamina::layer> slices;
  for (std::size_t l = 0; l < model.layers(); ++l) slices.push_back({model[l].name, {own[l].size()}});
  return lamina::layout(std::move(slices));
}

// Copies to or from bytes that lie one behind the other.
class byte_reader {
 public:
  explicit byte_reader(std::span<const std::byte> bytes) : rest_(bytes) {}
  template <class T>
  void take(std::span<T> into) {
    if (rest_.size() < into.size_bytes()) throw link_error("a share of the optimizer's state is too short");
    std::memcpy(into.data(), rest_.data(), into.size_bytes());
    rest_ = rest_.subspan(into.size_bytes());
  }
  bool is_over() const { return rest_.empty(); }

 private:
  std::span<const std::byte> rest_;
};

template <class T>
void append(std::vector<std::byte>& to, std::span<const T> elements) {
  const auto bytes = std::as_bytes(elements);
  to.insert(to.end(), bytes.begin(), bytes.end());
}

}  // namespace

sliced_optimizer::sliced_optimizer(const lamina::layout& model, owned_ranges own, const sgd_options& options)
    : model_(model), ranges_(std::move(own)), options_(options), own_(sliced(model, ranges_), options) {}

void sliced_optimizer::update(std::size_t layer, std::uint64_t step, std::span<const float> gradient,
                              std::span<float> parameters) {
  own_.begin(layer, step);
  own_.update(layer, 0, gradient, parameters);
}

void sliced_optimizer::take_up(std::span<const std::byte> state) {
  sgd whole(model_, options_);
  lab::take_up(state, whole);
  std::ranges::copy(whole.updated_in(), own_.updated_in().begin());
  if (whole.velocity().empty()) return;
  auto to = own_.velocity().begin();
  for (std::size_t l = 0; l < model_.layers(); ++l) {
    const auto from = whole.velocity().subspan(model_.offset(l) + ranges_[l].begin, ranges_[l].size());
    to = std::ranges::copy(from, to).out;
  }
}

std::vector<std::byte> sliced_optimizer::gather(
    worker_group& group, const std::function<owned_ranges(std::size_t worker)>& share_of) const {
  const bool has_velocity = !own_.velocity().empty();
  std::vector<std::byte> mine;
  const owned_ranges share = share_of(group.worker());
  const float* velocity = own_.velocity().data();
  for (std::size_t l = 0; l < model_.layers() && has_velocity; velocity += ranges_[l++].size())
    append(mine, std::span(velocity + share[l].begin - ranges_[l].begin, share[l].size()));
  append(mine, own_.updated_in());

  const std::vector<message> shares = group.gather(message_kind::state, payload(std::move(mine)));
  if (shares.empty()) return {};
  sgd whole(model_, options_);
  std::vector<std::uint64_t> updated_in(model_.layers());
  for (std::size_t w = 0; w < shares.size(); ++w) {
    byte_reader from(shares[w].bytes);
    const owned_ranges theirs = share_of(w);
    for (std::size_t l = 0; l < model_.layers() && has_velocity; ++l)
      from.take(whole.velocity().subspan(model_.offset(l) + theirs[l].begin, theirs[l].size()));
    from.take(std::span(updated_in));
    if (!from.is_over()) throw link_error("a share of the optimizer's state is too long");
    // Who has no element of a layer does not know when it was updated.
    for (std::size_t l = 0; l < model_.layers(); ++l)
      whole.updated_in()[l] = std::max(whole.updated_in()[l], updated_in[l]);
  }
  return state_of(whole);
}

}  // namespace lab
