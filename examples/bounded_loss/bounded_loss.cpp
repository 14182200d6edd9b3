// SPDX-License-Identifier: MIT
// A parameter server and a worker over UDP on loopback, where every fifth packet is lost on purpose: of each layer a tenth may be missing,
// and nothing is lost over time. Both are threads here; as processes or on machines their loops are the same.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <future>
#include <lamina/lamina.hpp>
#include <lamina/udp/udp.hpp>
#include <span>
#include <string>
#include <system_error>
#include <vector>

namespace {

namespace bounded = lamina::bounded;
namespace udp = lamina::udp;
using tensors = std::vector<std::vector<float>>;

constexpr std::uint64_t steps = 100;
constexpr std::uint32_t bound_ppm = 100'000;  // p = 0.1, in parts per million
constexpr std::size_t server_rank = 0;
constexpr std::size_t worker_rank = 1;
constexpr auto patience = std::chrono::seconds(60);

const lamina::layout model = [] {
  std::vector<lamina::layer> layers;
  for (std::size_t k = 1; k <= 8; ++k) layers.push_back({"layer " + std::to_string(k), {1000 * k, 10}});
  return lamina::layout(layers);
}();
constexpr auto as_is = lamina::payload_type::as_is;
constexpr auto none = lamina::frame_checksum::none;  // packets have one
const auto grid =  // as many elements a packet as fit into an Ethernet frame
    bounded::chunk_grid::of<float>(model, as_is, bounded::chunk_elements<float>(as_is, 1416));

tensors zeros() {
  tensors made;
  for (const std::size_t size : model.sizes()) made.emplace_back(size);
  return made;
}

// What of the frames that one rank sent was missing when their transfers ended.
struct losses {
  void add(const lamina::delivery& arrived) {
    elements += static_cast<double>(arrived.sent().sent_elements());
    lost += static_cast<double>(arrived.lost_elements());
  }
  void print(const char* name) const {
    std::printf("%s: %.1f %% of the elements were left out\n", name, 100 * lost / elements);
  }
  double elements = 0, lost = 0;
};

// The parameters at the end.
tensors serve(udp::transport& ranks, losses& down) {
  tensors values = zeros();
  const auto parameters = [&](std::size_t l) { return std::span<const float>(values[l]); };
  lamina::server<float> server(model, {.frame_checksum = none});
  for (;;) {
    // The last transfer loses nothing, so that the replicas end equal; each brings what was lost in the one before.
    const bool is_last = server.step() > steps;
    const auto reply = server.reply(0, values);
    const bounded::frame_chunks chunks(reply.frame(), reply.sent(), grid,
                                       {.bound_ppm = is_last ? 0 : bound_ppm});
    const auto owed = bounded::owed<float>(chunks, server.pending(0), parameters);
    const auto sent = ranks.send_frame({&worker_rank, 1}, chunks, {&owed, 1}, patience);
    server.commit(0, reply.clock(), *sent[0]);
    down.add(*sent[0]);
    if (is_last) return values;

    const udp::arrival got = ranks.receive(worker_rank, patience);
    if (const auto error = server.add_view(got.bytes))
      throw std::system_error(error);  // missing elements are zeros
    server.update([&](std::size_t layer, std::size_t begin, std::span<const float> mean) {
      for (std::size_t i = 0; i < mean.size(); ++i) values[layer][begin + i] -= 0.05F * mean[i];
    });
  }
}

// The replica at the end.
tensors work(udp::transport& ranks, losses& up) {
  tensors replica = zeros();
  lamina::worker<float> worker(model, {.drop_ratio = 0.5, .frame_checksum = none});
  bounded::loss_memory memory(grid);
  for (std::uint64_t step = 1;; ++step) {
    const udp::arrival got = ranks.receive(server_rank, patience);
    const auto pulled = lamina::decode<float>(got.bytes, model);
    for (std::size_t l = 0; l < model.layers(); ++l) pulled.restore(l, replica[l], got.arrived);
    for (const bounded::repair& each : got.repairs) {
      std::ranges::copy(each.elements,
                        std::as_writable_bytes(std::span(replica[each.layer]).subspan(each.begin)).begin());
    }
    if (step > steps) return replica;

    // The gradient of |parameters - 1|². What is lost stays in the residual, and must arrive after three losses in a row.
    tensors gradient = replica;
    for (auto& layer : gradient)
      for (float& each : layer) each = 2 * (each - 1);
    auto own = worker.add(gradient);
    const lamina::encoded_frame& frame = own.frame();
    const bounded::frame_chunks chunks(frame, own.sent(), grid, {.bound_ppm = bound_ppm});
    const bounded::obligations owed{.required = memory.required(own.sent(), 3)};
    const auto sent = ranks.send_frame({&server_rank, 1}, chunks, {&owed, 1}, patience);
    own.commit(*sent[0]);
    memory.note(*sent[0]);
    up.add(*sent[0]);
  }
}

}  // namespace

int main() try {
  std::vector<udp::open_sockets> opened;
  std::vector<udp::rank_addresses> all;
  for (const std::uint64_t rank : {server_rank, worker_rank}) {
    opened.emplace_back(udp::parse_addresses("127.0.0.1:0"),
                        udp::socket_options{.inject_loss = 0.2, .inject_seed = rank + 1});
    all.push_back(opened.back().addresses);
  }
  const std::uint64_t secret = udp::draw_secret();
  losses down, up;
  const auto run = [&](std::size_t rank) {
    const bool is_server = rank == server_rank;
    const auto kind = is_server ? lamina::frame_kind::gradients : lamina::frame_kind::parameters;
    udp::transport ranks(
        std::move(opened[rank]), all,
        {.rank = rank,
         .ranks = 2,
         .peers =
             {{.rank = 1 - rank, .sends = grid, .takes = grid, .kind = kind, .most_bound_ppm = bound_ppm}},
         .secret = secret});
    return is_server ? serve(ranks, down) : work(ranks, up);
  };
  auto worker = std::async(std::launch::async, run, worker_rank);
  const tensors server = run(server_rank);
  const tensors replica = worker.get();

  up.print("gradients");
  down.print("parameters");
  float loss = 0;  // of the worst element
  for (const auto& layer : replica)
    for (const float each : layer) loss = std::max(loss, (each - 1) * (each - 1));
  std::printf("loss %.4f at the end, replicas %s\n", static_cast<double>(loss),
              replica == server ? "equal" : "DIFFER");
  return replica == server && loss < 0.1F ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bounded_loss: %s\n", error.what());
  return 1;
}
