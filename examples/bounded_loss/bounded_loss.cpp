// SPDX-License-Identifier: MIT
// A parameter server and a worker over a network that loses every fifth packet: of each layer a tenth may be missing, and nothing is
// lost over time. Both ends are here, the network and its time are emulated; with sockets in its place the loop is the same.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <lamina/bounded/bounded.hpp>
#include <lamina/lamina.hpp>
#include <span>
#include <system_error>
#include <vector>

namespace {

namespace bounded = lamina::bounded;
using tensors = std::vector<std::vector<float>>;

constexpr int steps = 100;
constexpr std::uint32_t bound_ppm = 100'000;          // p = 0.1, in parts per million
constexpr std::uint64_t secret = 0x0123456789abcdef;  // of the run: both ends know it, and no other run's

const lamina::layout model = [] {
  std::vector<lamina::layer> layers;
  for (std::size_t k = 1; k <= 8; ++k) layers.push_back({"layer " + std::to_string(k), {1000 * k, 10}});
  return lamina::layout(layers);
}();
constexpr auto as_is = lamina::payload_type::as_is;
const auto grid =  // as many elements a packet as fit into an Ethernet frame
    bounded::chunk_grid::of<float>(model, as_is, bounded::chunk_elements<float>(as_is, 1416));

// From one rank to another: packets may be lost, control messages are not.
class one_way {
 public:
  one_way(std::uint16_t from, std::uint16_t to, lamina::frame_kind kind)
      : sender(grid, {.rank = from, .receiver = to, .secret = secret, .rate = {.link_bits = 1'000'000'000}}),
        receiver(grid, {.rank = to,
                        .sender = from,
                        .secret = secret,
                        .takes = {.kind = kind, .most_bound_ppm = bound_ppm}}),
        packets_({.seed = from + 1U, .loss = 0.2}) {}

  // One transfer from beginning to end: then receiver.frame() is what has come of it, and sender.arrived() what to commit.
  void transfer(const bounded::frame_chunks& frame, const bounded::obligations& beside) {
    receiver.release(now_);  // the frame before this one
    sender.begin(frame, {}, beside);
    for (;;) {
      send();
      if (!sender.is_under_way()) break;
      now_ = std::max(now_, std::min({packets_.next(), forth_.next(), back_.next(), sender.deadline(),
                                      receiver.deadline()}));
      while (auto packet = packets_.receive(now_)) receiver.on_datagram(packet->bytes, now_);
      while (auto message = forth_.receive(now_)) receiver.on_control(read(message->bytes), now_);
      while (auto message = back_.receive(now_)) sender.on_control(read(message->bytes));
    }
    if (sender.state() != bounded::sender_state::done) throw std::system_error(sender.failure());
    elements_ += static_cast<double>(sender.arrived().sent().sent_elements());
    lost_ += static_cast<double>(sender.arrived().lost_elements());
  }
  void print(const char* name) const {
    std::printf("%s: %.0f packets, %.0f of them sent again; %.1f %% of the elements were left out\n", name,
                static_cast<double>(sender.counters().packets),
                static_cast<double>(sender.counters().repeated), 100 * lost_ / elements_);
  }

  bounded::bounded_sender sender;
  bounded::bounded_receiver receiver;

 private:
  void say(auto& end, bounded::lossy_channel& way) {
    for (auto said = end.poll_control(now_); !said.empty(); said = end.poll_control(now_))
      way.send(0, {said}, now_);
  }
  // What both ends have to send goes out.
  void send() {
    say(sender, forth_);
    while (const auto packet = sender.next_packet(now_))
      packets_.send(0, {packet->header, packet->data[0], packet->data[1]}, now_);
    say(sender, forth_);  // behind the last packet there is a PROBE
    say(receiver, back_);
  }
  bounded::control_message read(std::span<const std::byte> bytes) {
    std::error_code error;
    const auto message = bounded::read_control(bytes, bounded::control_limits(grid), check_, error);
    if (error) throw std::system_error(error);
    return message;
  }

  bounded::lossy_channel packets_;
  bounded::lossy_channel forth_, back_;  // of control messages
  bounded::keyed_check check_{secret};
  bounded::instant now_{};
  double elements_ = 0, lost_ = 0;
};

}  // namespace

int main() try {
  one_way up(1, 0, lamina::frame_kind::gradients);
  one_way down(0, 1, lamina::frame_kind::parameters);
  constexpr auto none = lamina::frame_checksum::none;  // packets have one
  lamina::worker<float> worker(model, {.drop_ratio = 0.5, .frame_checksum = none});
  lamina::server<float> server(model, {.frame_checksum = none});
  bounded::loss_memory memory(grid);
  tensors parameters;
  for (const std::size_t size : model.sizes()) parameters.emplace_back(size);
  tensors replica = parameters;

  for (;;) {
    // Down. The last transfer loses nothing, so that the replicas end equal; each brings what was lost in the one before.
    const bool is_last = server.step() > steps;
    const auto reply = server.reply(0, parameters);
    const bounded::frame_chunks news(reply.frame(), reply.sent(), grid,
                                     {.bound_ppm = is_last ? 0 : bound_ppm});
    const auto owed = bounded::owed<float>(
        news, server.pending(0), [&](std::size_t l) { return std::span<const float>(parameters[l]); });
    down.transfer(news, owed.all());
    server.commit(0, reply.clock(), down.sender.arrived());
    const auto pulled = lamina::decode<float>(down.receiver.frame(), model);
    for (std::size_t l = 0; l < model.layers(); ++l) pulled.restore(l, replica[l], down.receiver.arrived());
    down.receiver.for_each_repair([&](std::size_t l, std::size_t begin, std::span<const std::byte> bytes) {
      std::ranges::copy(bytes, std::as_writable_bytes(std::span(replica[l]).subspan(begin)).begin());
    });
    if (is_last) break;

    // Up: the gradient of |parameters - 1|². What is lost stays in the residual, and must arrive after three losses in a row.
    tensors gradient = replica;
    for (auto& layer : gradient)
      for (float& each : layer) each = 2 * (each - 1);
    auto step = worker.add(gradient);
    const lamina::encoded_frame& frame = step.frame();
    const bounded::frame_chunks chunks(frame, step.sent(), grid, {.bound_ppm = bound_ppm});
    const auto required = memory.required(step.sent(), 3);
    up.transfer(chunks, {.required = required});
    step.commit(up.sender.arrived());
    memory.note(up.sender.arrived());
    // Holes are zeros.
    if (const auto error = server.add_view(up.receiver.frame())) throw std::system_error(error);
    server.update([&](std::size_t layer, std::size_t begin, std::span<const float> mean) {
      for (std::size_t i = 0; i < mean.size(); ++i) parameters[layer][begin + i] -= 0.05F * mean[i];
    });
  }

  up.print("gradients");
  down.print("parameters");
  float loss = 0;  // of the worst element
  for (const auto& layer : replica)
    for (const float each : layer) loss = std::max(loss, (each - 1) * (each - 1));
  std::printf("loss %.4f at the end, replicas %s\n", static_cast<double>(loss),
              replica == parameters ? "equal" : "DIFFER");
  return replica == parameters && loss < 0.1F ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bounded_loss: %s\n", error.what());
  return 1;
}
