// SPDX-License-Identifier: MIT
// What every rank but the server does. One loop is that of a worker for itself, of the leader of a node, and of the others of the node.
#include "training.hpp"

#include <lamina/lamina.hpp>
#include <optional>

#include "checkpoint.hpp"

namespace {

using leader_worker = std::optional<lamina::worker<float>>;  // none in the others of a node

// To the leader, the sum over its node; to the others nothing of use.
void sum_over_node(std::vector<torch::Tensor>& gradients, const ranks& who) {
  for (torch::Tensor& each : gradients) {
    MPI_Reduce(who.is_leader() ? MPI_IN_PLACE : each.data_ptr(), each.data_ptr(), static_cast<int>(each.numel()), MPI_FLOAT, MPI_SUM, 0,
               who.node);
  }
}

// The mean of all leaders' values, from the server: by it, all of them select the same fragments.
std::vector<double> agree(std::span<const double> own, const ranks& who) {
  who.send(std::as_bytes(own), 0, values_tag);
  const auto bytes = who.receive(0, agreed_tag);
  std::vector<double> agreed(own.size());
  std::memcpy(agreed.data(), bytes.data(), bytes.size());
  return agreed;
}

// What a checkpoint has of a worker: the running means of batch normalisation, of a leader its residual, and the steps done.
std::vector<char> state_of(const replica& own, const leader_worker& leader, std::uint64_t done) {
  std::vector<torch::Tensor> state = own.network.buffers();
  if (leader) state.push_back(tensor_of(leader->save()));
  state.push_back(torch::scalar_tensor(static_cast<std::int64_t>(done), torch::kLong));
  return torch::pickle_save(state);
}

// Takes up what the server has of this worker. Returns the steps that were done: 0 where the run begins.
std::uint64_t load_state(replica& own, leader_worker& leader, const ranks& who) {
  const auto bytes = who.receive(0, state_tag);
  if (bytes.empty()) return 0;
  const torch::NoGradGuard no_gradients;
  const auto* text = reinterpret_cast<const char*>(bytes.data());
  const auto state = torch::pickle_load({text, text + bytes.size()}).toTensorVector();
  std::vector<torch::Tensor> buffers = own.network.buffers();
  for (std::size_t i = 0; i < buffers.size(); ++i) buffers[i].copy_(state.at(i));
  if (leader) leader->load(bytes_of(state.at(buffers.size())));
  return static_cast<std::uint64_t>(state.back().item<std::int64_t>());
}

}  // namespace

void work(const run& of) {
  const ranks& who = of.who;
  replica own(of);
  const lamina::tiling cut(lamina::layout_of(own.network), of.with.fragment);
  leader_worker leader;
  if (who.is_leader()) {
    leader.emplace(cut.model(), lamina::worker_options{.drop_ratio = of.drop_ratio,
                                                       .search_every = of.with.refresh,
                                                       .fragment_elements = of.with.fragment,
                                                       .sender = static_cast<std::uint32_t>(who.sender(who.rank))});
  }

  std::vector<std::byte> frame;
  for (std::uint64_t step = load_state(own, leader, who) + 1;; ++step) {
    lamina::mpi::receive(frame, who.is_leader() ? 0 : who.leader, parameters_tag, MPI_COMM_WORLD, who.patience);
    if (leader) {  // the node's others wait for it: with less patience, so that the server hears of them by name
      const std::span others = std::span(who.nodes[who.sender(who.rank)]).subspan(1);
      lamina::mpi::send(std::span<const std::byte>(frame), others, parameters_tag, MPI_COMM_WORLD, who.patience / 4);
    }
    lamina::apply<float>(frame, cut, step, own.parameters);

    report told;
    if (of.tests_before(step)) own.test(told);
    if (step > of.with.steps) {
      told.checksum = checksum_of(own.parameters);
      who.send(std::as_bytes(std::span(&told, 1)), 0, report_tag);
      return;
    }
    own.compute(step, told);  // forward and backward
    who.send(std::as_bytes(std::span(&told, 1)), 0, report_tag);

    std::vector<torch::Tensor> gradients = lamina::gradients_of(own.parameters);
    sum_over_node(gradients, who);
    if (leader) {
      auto exchange = leader->add(gradients);
      if (!exchange) throw std::runtime_error("the gradient of layer " + cut.model()[exchange.refused_layer()].name + " is not finite");
      if (of.agrees()) std::ranges::copy(agree(exchange.values(), who), exchange.values().begin());
      who.send(exchange.frame(), 0, gradients_tag);
      exchange.commit();  // the server has it: what was sent leaves the residual
    }
    if (of.saves_after(step)) who.send(std::as_bytes(std::span<const char>(state_of(own, leader, step))), 0, state_tag);
  }
}
