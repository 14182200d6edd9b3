// SPDX-License-Identifier: MIT
// Torch first: its CHECK and Catch2's clash, so the tests say REQUIRE.
#include "lamina/collectives/gathered_linear.hpp"

#include <chrono>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#undef CHECK
#include "../memory_ranks.hpp"
#include "catch.hpp"
#include "lamina/collectives/collectives.hpp"
#include "support.hpp"

namespace {

using namespace lamina::collectives;
using lamina_test::contains;
using lamina_test::message_of;

constexpr std::int64_t rows = 6;
constexpr std::size_t ranks = 3;

// Two linear layers, the output of the first written in place.
struct network_impl : torch::nn::Module {
  network_impl()
      : hidden(register_module("hidden", gathered_linear(gate(), 8, 5))),
        output(
            register_module("output", gathered_linear(gate(), torch::nn::LinearOptions(5, 3).bias(false)))) {}
  torch::Tensor forward(const torch::Tensor& x) { return output(hidden(x).relu_()); }
  void gather(std::size_t of) {
    hidden->gather(of);
    output->gather(of);
  }
  gathered_linear hidden, output;
};
TORCH_MODULE_IMPL(network, network_impl);

network make_network(bool has_integers) {
  torch::manual_seed(3);
  network made;
  const torch::NoGradGuard no_grad;
  for (torch::Tensor& each : made->parameters())
    if (has_integers) each.copy_(torch::randint(-3, 4, each.sizes()).to(torch::kFloat));
  return made;
}

torch::Tensor batch_of(std::size_t rank, bool has_integers) {
  torch::manual_seed(10 + rank);
  return has_integers ? torch::randint(-4, 5, {rows, 8}).to(torch::kFloat) : torch::randn({rows, 8});
}

// Inputs of both layers, errors of both, of one rank behind the other.
struct gathered_passes {
  std::vector<float> inputs[2];
  std::vector<float> errors[2];

  void add(network& of) {
    gathered_linear layers[] = {of->hidden, of->output};
    for (int l = 0; l < 2; ++l) {
      inputs[l].insert(inputs[l].end(), layers[l]->inputs().begin(), layers[l]->inputs().end());
      errors[l].insert(errors[l].end(), layers[l]->errors().begin(), layers[l]->errors().end());
    }
  }
  void give(network& to) const {
    to->hidden->set_gradients(inputs[0], errors[0], ranks);
    to->output->set_gradients(inputs[1], errors[1], ranks);
  }
};

}  // namespace

TEST_CASE("gathered_linear: the gradient is the mean of all ranks', and the input's is as ever") {
  for (const bool has_integers : {true, false}) {
    std::vector<torch::Tensor> means;
    gathered_passes all;
    std::vector<network> replicas;
    for (std::size_t r = 0; r < ranks; ++r) {
      network plain = make_network(has_integers);
      const torch::Tensor x = batch_of(r, has_integers).requires_grad_();
      plain(x).pow(2).sum().backward();
      for (std::size_t p = 0; p < 3; ++p) {
        const torch::Tensor gradient = plain->parameters()[p].grad() / static_cast<double>(ranks);
        r == 0 ? means.push_back(gradient.clone()) : (void)means[p].add_(gradient);
      }
      network own = make_network(has_integers);
      own->gather(rows);
      const torch::Tensor same_x = batch_of(r, has_integers).requires_grad_();
      const torch::Tensor loss = own(same_x).pow(2).sum();
      loss.backward();
      REQUIRE(torch::equal(x.grad(), same_x.grad()));
      for (const torch::Tensor& each : own->parameters()) REQUIRE_FALSE(each.grad().defined());
      all.add(own);
      replicas.push_back(own);
    }
    for (network& each : replicas) {
      all.give(each);
      for (std::size_t p = 0; p < 3; ++p) {
        const torch::Tensor found = each->parameters()[p].grad();
        REQUIRE(torch::equal(found, replicas[0]->parameters()[p].grad()));
        // Sums of integers are exact; a third of them is rounded once here and three times there.
        REQUIRE(torch::allclose(found, means[p], 1e-5, has_integers ? 0 : 1e-5));
        REQUIRE(found.abs().max().item<float>() > 0);
      }
    }
  }
}

TEST_CASE("gathered_linear: hooks are told when the error is there, and no gradient is") {
  network own = make_network(false);
  own->gather(rows);
  std::vector<std::size_t> order;
  gradient_hooks hooks(*own, [&](std::size_t l) {
    order.push_back(l);
    REQUIRE_FALSE(own->parameters()[l].grad().defined());
    REQUIRE((l == 2 ? own->output : own->hidden)->errors().size() ==
            static_cast<std::size_t>(rows) * (l == 2 ? 3 : 5));
    if (l == 2)
      REQUIRE(
          contains(message_of<std::logic_error>([&] { (void)own->hidden->errors(); }), "no error before"));
  });
  own(batch_of(0, false)).sum().backward();
  hooks.check_all_called();
  REQUIRE(order.size() == 3);
  REQUIRE(order[0] == 2);
}

TEST_CASE("gathered_linear: an input that is written after the pass is kept as it was") {
  network own = make_network(false);
  own->gather(rows);
  const torch::Tensor x = batch_of(0, false);
  const torch::Tensor loss = own(x).sum();
  x.zero_();
  loss.backward();
  const torch::Tensor kept = batch_of(0, false);
  REQUIRE(std::memcmp(own->hidden->inputs().data(), kept.data_ptr(), kept.nbytes()) == 0);
}

TEST_CASE(
    "gathered_linear: of two forward passes before a backward pass the last one counts, and the first is "
    "refused") {
  network own = make_network(false);
  own->gather(rows);
  const torch::Tensor first = own(batch_of(0, false)).sum();
  const torch::Tensor last = own(batch_of(1, false)).sum();
  REQUIRE(contains(message_of<std::logic_error>([&] { first.backward(); }),
                   "two forward passes before a backward pass"));
  last.backward();
  const torch::Tensor kept = batch_of(1, false);
  REQUIRE(std::memcmp(own->hidden->inputs().data(), kept.data_ptr(), kept.nbytes()) == 0);
  // What comes before the gradients are taken leaves them as they are.
  (void)own(batch_of(0, false));
  REQUIRE(std::memcmp(own->hidden->inputs().data(), kept.data_ptr(), kept.nbytes()) == 0);
}

TEST_CASE("gathered_linear: a pass that is replayed leaves what was given") {
  network own = make_network(false);
  const torch::Tensor x = torch::randn({rows, 8});
  const torch::Tensor e = torch::randn({rows, 5});
  REQUIRE(contains(message_of<std::logic_error>([&] { own->hidden->set_pass(x, e); }), "gathers nothing"));
  own->gather(rows);
  REQUIRE(contains(message_of<std::invalid_argument>([&] { own->hidden->set_pass(e, x); }),
                   "are 6 rows of 8 and of 5 elements"));
  own->hidden->set_pass(x, e);
  own->hidden->set_gradients(own->hidden->inputs(), own->hidden->errors(), 1);
  REQUIRE(torch::allclose(own->hidden->weight.grad(), e.t().mm(x)));
  REQUIRE(contains(message_of<std::logic_error>([&] { (void)own->hidden->inputs(); }), "no error before"));
}

TEST_CASE("gathered_linear: it is a Linear where it does not gather") {
  network plain = make_network(false);
  network own = make_network(false);
  own->gather(rows);
  const torch::Tensor x = batch_of(0, false).slice(0, 0, 2);  // another number of rows
  own->eval();
  REQUIRE(torch::equal(own(x), plain(x)));
  own->train();
  {
    const torch::NoGradGuard no_grad;
    REQUIRE(torch::equal(own(x), plain(x)));
  }
  own->gather(0);
  own(x).sum().backward();
  plain(x).sum().backward();
  for (std::size_t p = 0; p < 3; ++p)
    REQUIRE(torch::equal(own->parameters()[p].grad(), plain->parameters()[p].grad()));
}

TEST_CASE("gathered_linear: what cannot be is refused by name, and a pass that was refused leaves no trace") {
  network own = make_network(false);
  own->gather(rows);
  const auto refused = [&](const torch::Tensor& x) {
    return message_of<std::invalid_argument>([&] { (void)own(x); });
  };
  REQUIRE(contains(refused(torch::randn({4, 8})), "was told 6 rows and is given 4"));
  REQUIRE(contains(refused(torch::randn({6, 8}, torch::kDouble)), "takes float32 on the CPU"));
  REQUIRE(contains(message_of<std::logic_error>([&] { (void)own->hidden->inputs(); }), "no error before"));
  const torch::Tensor x = batch_of(0, false);
  own(x).sum().backward();
  const torch::Tensor again = own(x).sum();
  REQUIRE(contains(message_of<std::logic_error>([&] { again.backward(); }), "two backward passes"));
  const std::vector<float> inputs(rows * 8 * 2);
  const std::vector<float> errors(rows * 5 * 2);
  const auto sizes = [&](std::size_t count) {
    return message_of<std::invalid_argument>([&] { own->hidden->set_gradients(inputs, errors, count); });
  };
  REQUIRE(contains(sizes(3), "the inputs of 3 ranks are 144 elements, not 96"));
  own->hidden->set_gradients(inputs, errors, 2);
  REQUIRE(own->hidden->weight.grad().abs().max().item<float>() == 0);
}

// Three ranks through the engine against one that has all rows: the tenth oracle for fully connected layers.
TEST_CASE("gathered_linear: over the engine three ranks train as one with all rows does") {
  constexpr int steps = 20;
  const auto loss_of = [](const torch::Tensor& y) { return y.pow(2).mean(1).mean() + y.sum(1).mean(); };
  const auto move = [](network& of) {
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& each : of->parameters()) each.sub_(each.grad(), 0.01);
  };
  std::vector<torch::Tensor> batches;
  for (std::size_t k = 0; k < steps * ranks; ++k) batches.push_back(batch_of(k, false));
  network alone = make_network(false);
  for (int step = 0; step < steps; ++step) {
    std::vector<torch::Tensor> of_step(batches.begin() + step * 3, batches.begin() + step * 3 + 3);
    alone->zero_grad();
    loss_of(alone(torch::cat(of_step))).backward();
    move(alone);
  }

  std::vector<network> replicas;
  for (std::size_t r = 0; r < ranks; ++r) replicas.push_back(make_network(false));
  const lamina::layout model =
      lamina_test::model_of({ranks * rows * 8, ranks * rows * 5, ranks * rows * 5, ranks * rows * 3});
  const std::vector<std::size_t> order = {2, 3, 0, 1};  // the output's input and error first
  const plan shared(model, ranks, order, std::vector(4, layer_class::gathered));
  memory_network over(ranks);
  const auto errors = lamina_test::in_threads(ranks, [&](std::size_t r) {
    network& own = replicas[r];
    own->gather(rows);
    engine sums(over.of(r), shared, {.timeout = std::chrono::seconds(20)});
    gradient_hooks hooks(*own, [&](std::size_t l) {
      if (l == 1) return;  // the bias goes with its weight
      gathered_linear& layer = l == 2 ? own->output : own->hidden;
      sums.ready(l, layer->inputs());
      sums.ready(l + 1, layer->errors());
    });
    for (int step = 0; step < steps; ++step) {
      sums.begin_step();
      loss_of(own(batches[step * ranks + r])).backward();
      hooks.check_all_called();
      sums.drain();
      own->hidden->set_gradients(sums.gathered(0), sums.gathered(1), ranks);
      own->output->set_gradients(sums.gathered(2), sums.gathered(3), ranks);
      move(own);
    }
  });
  REQUIRE(errors == std::vector<std::string>(ranks));
  for (std::size_t p = 0; p < 3; ++p) {
    for (network& each : replicas) REQUIRE(torch::equal(each->parameters()[p], replicas[0]->parameters()[p]));
    REQUIRE(torch::allclose(replicas[0]->parameters()[p], alone->parameters()[p], 1e-5, 1e-6));
    REQUIRE_FALSE(torch::allclose(alone->parameters()[p], make_network(false)->parameters()[p], 1e-2, 1e-3));
  }
}
