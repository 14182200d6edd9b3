// SPDX-License-Identifier: MIT
// Activations of fully connected layers in place of their gradients, and all of it against one worker that has all images.
#include "overlapped_runs.hpp"

#include <cmath>
#include <lamina/collectives/schedule.hpp>

namespace {

using namespace overlapped_runs;

constexpr std::uint64_t few_steps = 20;

settings without_momentum() {
  settings given;
  given.steps = few_steps;
  given.optimizer = {.learning_rate = 0.05F, .momentum = 0.5F, .weight_decay = 0.01F};
  given.overlap.plan.bucket_bytes = 0;
  return given;
}

// |a - b| / |b|, as vectors.
double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double error = 0;
  double size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    error += std::pow(static_cast<double>(a[i]) - b[i], 2);
    size += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(error / size);
}

// One worker with the images of all, in their order, without any of the loops: the parameters after each step.
std::vector<std::vector<float>> sequential(const settings& given) {
  torch::manual_seed(100);  // as worker 0
  replica local{torch::nn::AnyModule(network(given.normalises))};
  auto random = at::make_generator<at::CPUGeneratorImpl>(7);
  sgd optimizer(local.model(), given.optimizer);
  const learning_rate_schedule rate(given.optimizer.learning_rate, {}, 4);
  std::vector<std::vector<float>> after;
  for (std::uint64_t step = 1; step <= given.steps; ++step) {
    step_report report;
    const auto images = static_cast<std::int64_t>(ranks()) * batch_images;
    compute_gradients(local, labelled(torch::randn({images, 3, 6, 6}, random)), report);
    optimizer.set_learning_rate(rate.at(step));
    for (std::size_t l = 0; l < local.model().layers(); ++l) {
      optimizer.begin(l, step);
      optimizer.update(l, 0, local.gradient(l), local[l]);
    }
    after.push_back(parameters_of(local));
  }
  return after;
}

// That worker 0 sends of layers of so many elements, which are summed one by one.
std::size_t bytes_of_sums(const std::vector<std::size_t>& sizes) {
  std::size_t bytes = 0;
  for (const std::size_t elements : sizes) {
    const collectives::traffic sent = collectives::sent(collectives::rounds_of(
        collectives::operation::all_reduce, collectives::algorithm::pairwise, ranks(), 0, elements));
    bytes += sizeof(float) * sent.elements + 32 * sent.messages;
  }
  return bytes;
}
// Of one whose activations go round: b rows of n_in + n_out to each other worker, in two collectives.
std::size_t bytes_of_activations(std::int64_t inputs, std::int64_t outputs) {
  const std::size_t elements = static_cast<std::size_t>(batch_images * (inputs + outputs));
  return (ranks() - 1) * (sizeof(float) * elements + 2 * 32);
}

}  // namespace

TEST_CASE("overlap: activations in place of gradients train the same, with the same bits on all workers") {
  settings given = without_momentum();
  const diary expected = train(given);
  struct exchange {
    fc_exchange how;
    bool reaches_forward;
    bool has_owners;
  };
  for (const exchange& each :
       {exchange{fc_exchange::activations, false, false}, exchange{fc_exchange::activations, true, true},
        exchange{fc_exchange::by_cost, true, false}}) {
    given.overlap.fully_connected = each.how;
    given.overlap.reaches_forward = each.reaches_forward;
    given.overlap.has_owners = each.has_owners;
    const diary found = train(given);
    require_equal_replicas(found);
    REQUIRE(found.parameters.size() == few_steps);
    CHECK(relative_error(found.at_end, expected.at_end) < 1e-5);
    // Over several workers the sums are made in another way, and so rounded elsewhere.
    if (ranks() > 1) CHECK(!same_bits(found.at_end, expected.at_end));
  }
}

TEST_CASE("overlap: what activations move is b (n_in + n_out) elements to each other worker") {
  settings given = without_momentum();
  given.steps = 2;
  const auto moved = [&](fc_exchange how) {
    given.overlap.fully_connected = how;
    return train(given).metrics.back();
  };
  const std::vector<std::size_t> others = {8 * 27, 8, 8, 1};  // conv, norm, scale
  const std::size_t hidden = features * hidden_width;
  const std::size_t output = hidden_width * classes;
  std::vector<std::size_t> all = others;
  for (const std::size_t each : {hidden, std::size_t{hidden_width}, output, std::size_t{classes}})
    all.push_back(each);
  const std::size_t of_hidden = bytes_of_activations(features, hidden_width);
  const std::size_t of_output = bytes_of_activations(hidden_width, classes);
  if (rank_of_this() != 0) {
    for (const fc_exchange how : {fc_exchange::gradients, fc_exchange::activations, fc_exchange::by_cost})
      moved(how);
    return;
  }
  // Each way half of it, as worker 0 counts.
  const auto up = [&](std::size_t bytes) { return bytes / 2 * ranks(); };
  CHECK(moved(fc_exchange::gradients).bytes_up == up(bytes_of_sums(all)));
  CHECK(moved(fc_exchange::activations).bytes_up == up(bytes_of_sums(others) + of_hidden + of_output));
  // The output's gradient is the smaller one over many workers.
  std::vector<std::size_t> rest = others;
  const bool gathers_output = 4 * 69 * ranks() < 2 * output;
  if (!gathers_output) rest.insert(rest.end(), {output, std::size_t{classes}});
  CHECK(moved(fc_exchange::by_cost).bytes_up ==
        up(bytes_of_sums(rest) + of_hidden + (gathers_output ? of_output : 0)));
}

// The tenth oracle.
TEST_CASE("overlap: workers train what one does that has the images of all of them") {
  settings given = without_momentum();
  given.normalises = false;
  given.shares_images = true;
  const auto expected = sequential(given);
  for (const bool has_owners : {false, true}) {
    for (const fc_exchange how : {fc_exchange::gradients, fc_exchange::activations}) {
      given.overlap.has_owners = has_owners;
      given.overlap.fully_connected = how;
      const diary found = train(given);
      for (std::size_t step = 0; step < few_steps; ++step) {
        INFO("after step " << step + 1);
        REQUIRE(relative_error(found.parameters[step], expected[step]) < 1e-5);
      }
      REQUIRE(relative_error(found.at_end, found.parameters.front()) > 1e-3);  // it does train
    }
  }
}

TEST_CASE("overlap: a checkpoint of activations holds the optimizer of all layers, with owners and without") {
  settings given = without_momentum();
  given.steps = steps;
  given.checkpoint_period_steps = 12;
  given.overlap.fully_connected = fc_exchange::activations;
  std::vector<std::byte> optimizer;
  for (const bool has_owners : {false, true}) {
    given.overlap.has_owners = has_owners;
    const diary found = train(given);
    settings rest = given;
    rest.steps_done = 12;
    if (rank_of_this() == 0) {
      const bool is_same = found.saved[0].optimizer == optimizer;
      REQUIRE((is_same || !has_owners));
      optimizer = found.saved[0].optimizer;
      rest.from = found.saved[0];
      rest.parameters = found.parameters[11];
    }
    const diary resumed = train(rest);
    for (std::size_t i = 0; i < resumed.parameters.size(); ++i)
      REQUIRE(same_bits(resumed.parameters[i], found.parameters[12 + i]));
  }
}
