// SPDX-License-Identifier: MIT
// Makes every public class and calls every member template once, for clang-tidy and cppcheck, which see templates only as
// far as they are instantiated. It is compiled, and never run.
#include <array>
#include <cstddef>
#include <lamina/collectives/collectives.hpp>
#include <lamina/lamina.hpp>
#include <optional>
#include <span>
#include <system_error>
#include <vector>

template class lamina::residual_accumulator<float>;
template class lamina::residual_accumulator<double>;
template class lamina::gradient_compressor<float>;
template class lamina::gradient_compressor<double, lamina::max_abs>;
template class lamina::gradient_aggregator<float>;
template class lamina::gradient_aggregator<double>;
template class lamina::parameter_publisher<float>;
template class lamina::frame_view<float>;
template class lamina::frame_view<double>;
template class lamina::frame_encoder<float>;
template class lamina::drift_compressor<float>;
template class lamina::outer_step<float>;

namespace {

using gradient = std::vector<float>;

void work(lamina::gradient_compressor<float>& worker, std::error_code& error) {
  const std::vector<std::optional<gradient>> gradients = {gradient(4), std::nullopt};
  const std::vector<lamina::bfloat16> halves(4);
  worker.accumulate(0, gradients[0]);
  worker.accumulate(0, halves, 0.5);
  worker.accumulate(0, gradient(4), error, 0.5, lamina::sequential());
  worker.accumulate_all(gradients, 0.5);
  worker.accumulate_all(gradients, error);
  worker.skip(1);
  const std::vector<double> agreed(2);
  const std::array<char, 2> held = {0, 1};
  worker.select(agreed, held, error);
  std::vector<char> zeros(2);
  worker.find_zero(gradients, zeros);
  std::vector<float> packed(worker.first_non_finite(gradients).value_or(worker.chosen().sent_elements()));
  worker.pack(packed, 2);
  worker.commit();
  lamina::delivery arrived(worker.chosen(), 4);
  const lamina::part_slices slices(worker.parts(), 2, 4);
  slices.lose(0, lamina::delivery(slices.cut(worker.chosen(), 0), 4), arrived);
  arrived.lose(0, 0);
  worker.commit(arrived);
  worker.begin_step();
  worker.plan_next(worker.predicted_values());
}

void serve(const lamina::layout& model, lamina::gradient_aggregator<float>& server,
           lamina::parameter_publisher<float>& publisher, std::span<const std::byte> bytes,
           std::vector<gradient>& parameters, std::error_code& error) {
  server.add(lamina::decode<float>(bytes, model));
  for (std::size_t l = 0; l < model.layers(); ++l) {
    server.mean(l, [&](std::size_t begin, std::span<const float> mean) { parameters[l][begin] -= mean[0]; });
  }
  publisher.update(server.arrived());
  server.next_step();
  const std::vector<std::byte> reply =
      publisher.encode_for_all(1, [&](std::size_t l) { return std::span<const float>(parameters[l]); })
          .to_bytes();
  const auto frame = lamina::decode<float>(reply, model);
  frame.apply_to(0, parameters[0]);
  const lamina::delivery arrived(publisher.published_to_all(), 4);
  frame.restore(0, parameters[0], arrived);
  publisher.commit(0, arrived);
  if (!publisher.pending(0).empty()) parameters.clear();
  if (lamina::peek(bytes, error).size_bytes > lamina::largest_frame_bytes<float>(model)) parameters.clear();
}

}  // namespace

// Not in an unnamed namespace, or they would not be needed.
void lamina_lint(lamina::gradient_compressor<float>& worker, lamina::gradient_aggregator<float>& server,
                 lamina::parameter_publisher<float>& publisher, std::span<const std::byte> bytes,
                 std::vector<std::vector<float>>& parameters, std::error_code& error);
void lamina_lint(lamina::gradient_compressor<float>& worker, lamina::gradient_aggregator<float>& server,
                 lamina::parameter_publisher<float>& publisher, std::span<const std::byte> bytes,
                 std::vector<std::vector<float>>& parameters, std::error_code& error) {
  work(worker, error);
  serve(worker.model(), server, publisher, bytes, parameters, error);
}
