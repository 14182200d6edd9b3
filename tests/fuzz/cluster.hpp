// SPDX-License-Identifier: MIT
#pragma once

// A server, synchronous or not, and its workers, driven by the bytes as commands in any order: sends that fail, frames that are
// damaged, doubled or late, steps without some workers, replies that are lost or acknowledged out of order, workers that
// restart. With integers for gradients sums are exact: nothing is lost, a reply that arrives makes the replica the server's, and what is
// refused is refused by name and changes nothing.
#include <optional>

#include "fuzz.hpp"
#include "lamina/server.hpp"
#include "steps.hpp"

namespace lamina_fuzz::of_cluster {
namespace {

using lamina::errc;
using lamina_test::same_tensors;
using lamina_test::zeros_like;
using tensors = lamina_test::tensors<float>;
using counts = std::vector<std::size_t>;

constexpr std::size_t unknown = ~std::size_t{0};

tensors filled(const lamina::layout& model, float value) {
  tensors values;
  for (const std::size_t size : model.sizes()) values.emplace_back(size, value);
  return values;
}

struct reply {
  bytes frame;
  std::uint64_t clock;
  tensors parameters;  // the server's, then
  counts updates;      // of each layer, then
};

struct node {
  node(const lamina::layout& model, const lamina::worker_options& options)
      : worker(model, options),
        computed(zeros_like<float>(model)),
        sent(computed),
        replica(filled(model, -777)),
        known(model.layers(), unknown) {}

  lamina::worker<float> worker;
  std::optional<lamina::worker<float>::step> step;
  std::vector<char> has_gradient;  // in the step that is open
  bytes frame;                     // of the last step that had one
  std::uint64_t frame_of = 0;      // that step
  tensors computed;                // the sum of all gradients
  tensors sent;                    // the sum of all that was committed
  tensors replica;
  std::optional<reply> under_way;
  std::vector<reply> arrived;  // that are not acknowledged, or may be again
  counts known;                // the updates in the newest that was acknowledged
  std::uint64_t taken = 0;     // the step of its last frame that the server took
};

lamina::layout small_model(input& in) {
  constexpr std::array<std::size_t, 16> some_sizes = {1, 0, 2,  3,  64, 65, 70, 4097,
                                                      1, 5, 10, 20, 30, 63, 66, 130};
  std::vector<std::size_t> sizes(1 + in.below(5));
  for (std::size_t& size : sizes) size = in.one_of(some_sizes);
  return lamina_test::model_of(sizes);
}

lamina::worker_options options_of(input& in) {
  lamina::worker_options options;
  options.drop_ratio = in.one_of<double, 5>({0.5, 0.9, 0.99, 0, 1});
  options.at_least_every = in.below(4);
  if (in.below(4) == 3) options.send_budget = 0.3;
  options.payload = static_cast<lamina::payload_type>(in.below(6));
  return options;
}

class cluster {
 public:
  explicit cluster(input& in)
      : in_(in),
        random_(in.random()),
        model_(small_model(in)),
        options_(options_of(in)),
        count_(1 + in.below(3)),
        is_asynchronous_(in.flag()),
        server_(model_, {.workers = count_, .asynchronous = is_asynchronous_}),
        parameters_(zeros_like<float>(model_)),
        updates_(model_.layers(), 0) {
    for (options_.sender = 0; options_.sender < count_; ++options_.sender)
      nodes_.emplace_back(model_, options_);
  }

  void command() {
    const std::size_t w = in_.below(count_);
    switch (in_.below(16)) {
      case 0:
        return accumulate(w, in_.below(model_.layers()));
      case 1:
      case 2:
      case 3:
        for (std::size_t l = 0; l < model_.layers(); ++l) accumulate(w, l);
        return;
      case 4:
      case 5:
        return encode(w);
      case 6:
      case 7:
        return arrive(w);
      case 8:
        return nodes_[w].step.reset();  // given up
      case 9:
        return damage(w);
      case 10:
      case 11:
        return restart(w);
      case 12:
        return update();
      case 13:
        return acknowledge(w);
      case 14:
        return make_reply(w);
      default:
        return reply_arrives(nodes_[w]);
    }
  }

  void check_all() const {
    for (const node& one : nodes_)
      check(lamina_test::conserves(one.worker, one.sent, one.computed),
            "no gradient is lost or counted twice");
  }

 private:
  // A worker mostly waits for the server's step.
  void accumulate(std::size_t w, std::size_t l) {
    node& one = nodes_[w];
    if (!one.step || has_frame(one)) {
      if (one.worker.steps() >= server_.step(w) && in_.below(8) != 7) return;
      one.step.reset();
      if (one.worker.steps() + 1 < server_.step(w)) one.worker.skip_to(server_.step(w));
      one.step = one.worker.begin();
      one.frame_of = 0;  // a step that was given up has had this number
      one.has_gradient.assign(model_.layers(), 0);
    }
    const auto gradient = lamina_test::random_integers<float>(random_, model_.sizes()[l], 1 + in_.below(8));
    check(one.step->add(l, gradient), "integers are taken");
    one.has_gradient[l] = 1;
    for (std::size_t i = 0; i < gradient.size(); ++i) one.computed[l][i] += gradient[i];
  }

  static bool has_frame(const node& one) { return one.step && one.frame_of == one.step->number(); }

  void encode(std::size_t w) {
    node& one = nodes_[w];
    if (!one.step) return;
    bool is_ready = true;
    for (std::size_t l = 0; l < model_.layers(); ++l)
      is_ready &= one.has_gradient[l] != 0 || model_.sizes()[l] == 0;
    const bool refused = throws<std::logic_error>([&] { one.frame = one.step->frame().to_bytes(); });
    check(refused != is_ready, "a frame has the gradients of all layers");
    if (!refused) one.frame_of = one.step->number();
  }

  // Frames of steps that were given up may have been sent, and are not here: a server could not tell them from what holds them, too.
  void arrive(std::size_t w) {
    node& one = nodes_[w];
    if (one.frame.empty()) return;
    const bool may_arrive = has_frame(one);
    if (!add(one.frame, may_arrive)) return;
    check(!add(one.frame, true), "no frame is taken twice");
    lamina_test::receive<float>(one.sent, one.frame, model_);
    one.step->commit();
    one.step.reset();
  }

  // Adds a frame and checks what becomes of it. A good one that nobody may send is not added.
  bool add(const bytes& frame, bool may_arrive) {
    const auto view = lamina::decode<float>(frame, model_);
    std::error_code expected;
    const std::uint64_t taken = nodes_[view.sender()].taken;
    if (taken != 0 && view.step() == taken) {
      expected = errc::duplicate_frame;
    } else if (is_asynchronous_ ? view.step() <= taken : view.step() != server_.step()) {
      expected = errc::unexpected_step;
    }
    if (!expected && !may_arrive) return false;
    const lamina::selection arrived = server_.arrived();
    const counts missing = server_.missing();
    check(server_.add(frame) == expected, "a frame is taken, or refused for its own reason");
    if (expected) {
      check(std::ranges::equal(arrived.bitmap(), server_.arrived().bitmap()) && missing == server_.missing(),
            "a refused frame changes nothing");
      return false;
    }
    accepted_.push_back(frame);
    nodes_[view.sender()].taken = view.step();
    return true;
  }
  std::uint32_t sender_of(const bytes& frame) const { return lamina::decode<float>(frame, model_).sender(); }

  void damage(std::size_t w) {
    if (nodes_[w].frame.empty()) return;
    bytes frame = nodes_[w].frame;
    frame[in_.value<std::uint16_t>() % frame.size()] ^= static_cast<std::byte>(1 + in_.below(255));
    const counts missing = server_.missing();
    const std::error_code error = server_.add(std::move(frame));
    check(error && error.category() == lamina::category(), "damage is seen");
    check(missing == server_.missing(), "damage changes nothing");
  }

  void restart(std::size_t w) {
    node& one = nodes_[w];
    bytes saved;
    const bool refused = throws<std::logic_error>([&] { saved = one.worker.save(); });
    check(refused == one.step.has_value(), "a state is saved between steps");
    if (refused) return;
    options_.sender = static_cast<std::uint32_t>(w);
    one.worker = lamina::worker<float>(model_, options_);
    one.worker.load(saved);
    if (in_.flag()) return;
    // The replica is lost too, and a reply under way. Acknowledgements from before still come.
    server_.forget(w);
    one.taken = 0;
    std::erase_if(accepted_, [&](const bytes& each) { return sender_of(each) == w; });
    one.replica = filled(model_, -777);
    one.under_way.reset();
    for (const reply& each : one.arrived) server_.commit(w, each.clock);
    one.arrived.clear();
    one.known.assign(model_.layers(), unknown);
  }

  void update() {
    const std::size_t present = accepted_.size();
    check(server_.complete() == (is_asynchronous_ ? present > 0 : present == count_),
          "a step has a frame of each");
    const auto descend = [&](std::size_t l, std::size_t begin, std::span<const float> mean) {
      for (std::size_t i = 0; i < mean.size(); ++i) parameters_[l][begin + i] -= mean[i];
    };
    if (present == 0)
      return check(throws<std::logic_error>([&] { server_.update(descend); }), "nothing has arrived");
    if (!server_.complete() && in_.below(4) != 3) return;  // mostly waits

    tensors expected = parameters_;
    tensors sum = zeros_like<float>(model_);
    std::vector<char> has_come(model_.layers(), 0);
    for (const bytes& each : accepted_) {
      const auto view = lamina::decode<float>(each, model_);
      lamina_test::receive<float>(sum, each, model_);
      for (std::size_t l = 0; l < model_.layers(); ++l)
        if (!view.is_dropped(l)) has_come[l] = 1;
      if (!is_asynchronous_ && &each != &accepted_.back()) continue;
      for (std::size_t l = 0; l < model_.layers(); ++l) {
        for (std::size_t i = 0; i < sum[l].size(); ++i) {
          const volatile float mean = sum[l][i] / static_cast<float>(is_asynchronous_ ? count_ : present);
          expected[l][i] -= mean;
        }
      }
      sum = zeros_like<float>(model_);
    }
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      check(server_.arrived().is_sent(l) == (has_come[l] != 0), "what was sent has arrived");
      updates_[l] += has_come[l] != 0 ? 1 : 0;
    }
    server_.update(descend);
    check(same_tensors(parameters_, expected), "the mean is over the workers that are there");
    accepted_.clear();
  }

  void make_reply(std::size_t w) {
    node& one = nodes_[w];
    const auto made = server_.reply(w, parameters_);
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      check(made.sent().is_sent(l) == (one.known[l] != updates_[l] && model_.sizes()[l] > 0),
            "a worker gets what it is not known to have, and no more");
    }
    one.under_way = {made.to_bytes(), made.clock(), parameters_,
                     updates_};  // one that has not arrived is lost
  }

  void reply_arrives(node& one) {
    if (!one.under_way) return;
    const auto frame = lamina::decode<float>(one.under_way->frame, model_);
    for (std::size_t l = 0; l < model_.layers(); ++l) frame.apply_to(l, one.replica[l]);
    check(same_tensors(one.replica, one.under_way->parameters), "a replica is the server's model");
    one.arrived.push_back(*std::move(one.under_way));
    one.under_way.reset();
  }

  void acknowledge(std::size_t w) {
    node& one = nodes_[w];
    if (one.arrived.empty()) return;
    const reply& any = one.arrived[in_.below(256) % one.arrived.size()];
    server_.commit(w, any.clock);
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      if (one.known[l] == unknown || one.known[l] < any.updates[l]) one.known[l] = any.updates[l];
    }
  }

  input& in_;
  std::mt19937 random_;
  lamina::layout model_;
  lamina::worker_options options_;
  std::size_t count_;
  bool is_asynchronous_;
  lamina::server<float> server_;
  std::vector<bytes> accepted_;  // in this step, in the order of arrival
  tensors parameters_;
  counts updates_;  // of each layer
  std::vector<node> nodes_;
};

}  // namespace

void fuzz_one(input in) {
  cluster run(in);
  for (int commands = 0; commands < 500 && !in.is_empty(); ++commands) {
    run.command();
    if (commands % 16 == 0) run.check_all();
  }
  run.check_all();
}

}  // namespace lamina_fuzz::of_cluster
