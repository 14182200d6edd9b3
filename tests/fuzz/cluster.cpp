// SPDX-License-Identifier: MIT
// A synchronous server and its workers, driven by the bytes as commands in any order: steps in parts and whole, sends that fail, frames that are
// damaged, doubled, late or of strangers, steps without some workers, replies that are lost, workers that restart. With
// integers for gradients sums are exact: nothing is lost, every replica is the server's, and what is refused is refused by
// name and changes nothing.
#include <algorithm>
#include <optional>

#include "fuzz.hpp"
#include "lamina/server.hpp"
#include "lamina/worker.hpp"

namespace lamina_fuzz {
namespace {

using lamina::frame_errc;
using lamina::frame_kind;
using tensors = std::vector<std::vector<float>>;

tensors filled(const lamina::layout& model, float value) {
  tensors values;
  for (const std::size_t size : model.sizes()) values.emplace_back(size, value);
  return values;
}

bool same_tensors(const tensors& a, const tensors& b) {
  return std::ranges::equal(a, b, [](const auto& x, const auto& y) { return lamina_test::same_bits(x, y); });
}

enum class phase { idle, accumulating, encoded };

struct worker {
  worker(const lamina::layout& model, const lamina::compressor_options& options)
      : compressor(model, options),
        computed(filled(model, 0)),
        sent(filled(model, 0)),
        replica(filled(model, -777)),
        is_stale(model.layers(), true),
        is_stale_after(model.layers(), true) {}

  lamina::gradient_compressor<float> compressor;
  phase at = phase::idle;
  std::vector<bool> has_gradient;  // in the step under way
  std::vector<bytes> parts;        // of the step under way
  std::vector<bytes> frames;       // of the last step: one, or its parts
  bool may_arrive = false;         // neither committed nor given up
  tensors computed;                // the sum of all gradients
  tensors sent;                    // the sum of all that was committed
  tensors replica;
  std::vector<bool> is_stale;        // layers that the replica has not heard of
  std::vector<bytes> reply;          // under way, if there is one: a frame, or its parts
  tensors replied;                   // the server's model in it
  std::vector<bool> is_stale_after;  // layers updated since it was encoded
};

lamina::layout small_model(input& in) {
  constexpr std::array<std::size_t, 16> some_sizes = {1, 0, 2,  3,  64, 65, 70, 4097,
                                                      1, 5, 10, 20, 30, 63, 66, 130};
  std::vector<std::size_t> sizes(1 + in.below(5));
  for (std::size_t& size : sizes) size = in.one_of(some_sizes);
  return lamina_test::model_of(sizes);
}

lamina::compressor_options options_of(input& in) {
  lamina::compressor_options options;
  options.drop_ratio = in.one_of<double, 5>({0.5, 0.9, 0.99, 0, 1});
  options.max_age = in.below(4);
  if (in.below(4) == 3) options.byte_budget = 0.3;
  if (in.below(4) == 3) options.refresh = lamina::refresh_schedule::fixed(4);
  options.payload = static_cast<lamina::payload_type>(in.below(5));
  if (in.below(3) == 2) options.decide = lamina::decision_timing::as_ready;
  return options;
}

class cluster {
 public:
  explicit cluster(input& in)
      : in_(in),
        random_(in.random()),
        model_(small_model(in)),
        options_(options_of(in)),
        accepted_(1 + in.below(3)),
        aggregator_(lamina::gradient_aggregator<float>::of_workers(model_, accepted_.size())),
        publisher_(model_, accepted_.size()),
        encoder_(model_),
        encoder_of_another_run_(model_, 5),
        parameters_(filled(model_, 0)),
        expected_(parameters_) {
    for (options_.sender = 0; options_.sender < accepted_.size(); ++options_.sender)
      workers_.emplace_back(model_, options_);
  }

  void command() {
    const std::size_t w = in_.below(workers_.size());
    switch (in_.below(16)) {
      case 0:
        accumulate(w, in_.below(model_.layers()));
        break;
      case 1:
      case 2:
      case 3:
        for (std::size_t l = 0; l < model_.layers(); ++l) accumulate(w, l);
        break;
      case 4:
      case 5:
        encode(w);
        break;
      case 6:
      case 7:
      case 8:
        arrive(w);
        break;
      case 9:
        damage(w);
        break;
      case 10:
        stranger();
        break;
      case 11:
        restart(w);
        break;
      case 12:
      case 13:
        finish_step();
        break;
      case 14:
        publish(w);
        break;
      default:
        publish_to_all();
    }
    if (model_.elements() < 500) check_conservation(w);  // else at the end alone, to try more
  }

  void check_all() {
    for (std::size_t w = 0; w < workers_.size(); ++w) check_conservation(w);
  }

 private:
  // A worker mostly waits for the server's step.
  void accumulate(std::size_t w, std::size_t l) {
    worker& one = workers_[w];
    if (one.at != phase::accumulating) {
      if (one.compressor.step() >= aggregator_.step() && in_.below(8) != 7) return;
      one.at = phase::accumulating;
      one.has_gradient.assign(model_.layers(), false);
      one.may_arrive = false;  // what was not sent yet is given up
      one.parts.clear();
    }
    if (is_as_ready() && one.has_gradient[l]) {  // it is decided
      if (model_.sizes()[l] == 0) return;
      check(throws<std::logic_error>(
                [&] { one.compressor.accumulate(l, std::vector<float>(model_.sizes()[l])); }),
            "nothing comes to a layer that is decided");
      return;
    }
    const auto gradient = lamina_test::random_integers<float>(random_, model_.sizes()[l], 1 + in_.below(8));
    one.compressor.accumulate(l, gradient);
    one.has_gradient[l] = true;
    for (std::size_t i = 0; i < gradient.size(); ++i) one.computed[l][i] += gradient[i];
    if (is_as_ready() && in_.below(4) == 3) one.parts.push_back(one.compressor.encode_ready().to_bytes());
  }

  bool is_as_ready() const { return options_.decide == lamina::decision_timing::as_ready; }

  void encode(std::size_t w) {
    worker& one = workers_[w];
    bool is_ready = one.at != phase::idle;
    for (std::size_t l = 0; is_ready && l < model_.layers(); ++l)
      is_ready = one.has_gradient[l] || model_.sizes()[l] == 0;
    // Of a step that has begun in parts the rest; encoded again, all of it, whole or in parts.
    const bool is_rest = one.at == phase::accumulating && !one.parts.empty();
    const bool is_in_parts = is_rest || (is_as_ready() && in_.flag());
    std::vector<bytes> frames;
    if (is_rest) frames = one.parts;
    const bool refused = throws<std::logic_error>([&] {
      if (is_in_parts && one.at == phase::encoded && in_.flag())
        frames.push_back(one.compressor.encode_ready().to_bytes());
      frames.push_back((is_in_parts ? one.compressor.encode_rest() : one.compressor.encode()).to_bytes());
    });
    check(refused != is_ready, "a frame has the gradients of all layers");
    if (refused) return;
    one.frames = std::move(frames);
    one.at = phase::encoded;
    one.may_arrive = true;
  }

  void arrive(std::size_t w) {
    worker& one = workers_[w];
    if (one.frames.empty()) return;
    std::vector<bytes> frames = one.frames;
    for (std::size_t k = 0; k < frames.size(); ++k) {
      if (!add(lamina::decode<float>(frames[k], model_), one.may_arrive)) {
        check(k == 0, "of a step all parts are taken or none");
        return;
      }
      if (k == 0) accepted_[w].emplace();
      accepted_[w]->push_back(std::move(frames[k]));  // the view goes with it
      check(!add(lamina::decode<float>(one.frames[k], model_), true), "no part is taken twice");
    }
    {
      one.compressor.commit();
      one.may_arrive = false;
      one.at = phase::idle;
      for (const bytes& frame : *accepted_[w]) receive(one.sent, lamina::decode<float>(frame, model_), true);
    }
  }

  // Adds a frame and checks what becomes of it. A good one that nobody may send is not added.
  bool add(const lamina::frame_view<float>& frame, bool may_arrive) {
    std::optional<frame_errc> expected;
    if (frame.kind() != frame_kind::gradients) {
      expected = frame_errc::unexpected_kind;
    } else if (frame.run() != 0) {
      expected = frame_errc::other_run;
    } else if (frame.step() != aggregator_.step()) {
      expected = frame_errc::unexpected_step;
    } else if (frame.sender() >= workers_.size()) {
      expected = frame_errc::unknown_sender;
    } else if (const auto& taken = accepted_[frame.sender()]) {
      const bool are_whole = !frame.is_part() && !lamina::decode<float>(taken->front(), model_).is_part();
      // The last part that was taken is one that is not expected, and so is any other but the next.
      if (are_whole || frame.part() != taken->size() || !frame.is_part())
        expected = are_whole ? frame_errc::duplicate_sender : frame_errc::unexpected_part;
      else if (lamina::decode<float>(taken->back(), model_).ends_step())
        expected = frame_errc::unexpected_part;
    } else if (!may_arrive) {
      return false;
    }
    const std::vector<std::uint8_t> arrived(aggregator_.arrived().bitmap().begin(),
                                            aggregator_.arrived().bitmap().end());
    const std::size_t present = aggregator_.workers_present();
    std::error_code code;
    const bool is_done = outcome_of([&] { aggregator_.add(frame); }, &code) == outcome::done;
    check(is_done != expected.has_value(), "a frame is refused for a reason");
    if (is_done) return true;
    check(code == *expected, "a frame is refused for its own reason");
    check(std::ranges::equal(arrived, aggregator_.arrived().bitmap()) &&
              present == aggregator_.workers_present(),
          "a refused frame changes nothing");
    return false;
  }

  void damage(std::size_t w) {
    if (workers_[w].frames.empty()) return;
    bytes frame = workers_[w].frames[in_.below(256) % workers_[w].frames.size()];
    frame[in_.value<std::uint16_t>() % frame.size()] ^= static_cast<std::byte>(1 + in_.below(255));
    std::error_code code;
    lamina::decode<float>(frame, model_, code);
    check(code && code.category() == lamina::frame_category(), "damage is seen");
  }

  // A frame that decodes but is nobody's.
  void stranger() {
    const auto kind = in_.flag() ? frame_kind::gradients : frame_kind::parameters;
    const std::uint64_t step = aggregator_.step() + in_.below(4) - 1;
    const bytes frame =
        (in_.below(4) == 3 ? encoder_of_another_run_ : encoder_)
            .encode(kind, step, static_cast<std::uint32_t>(in_.below(6)), lamina::selection(model_),
                    [](std::size_t) { return std::span<const float>(); })
            .to_bytes();
    add(lamina::decode<float>(frame, model_), false);
  }

  void restart(std::size_t w) {
    worker& one = workers_[w];
    bytes saved;
    const bool refused = throws<std::logic_error>([&] { saved = one.compressor.save(); });
    check(refused == (one.at == phase::accumulating), "a state is saved between steps");
    if (refused) return;
    options_.sender = static_cast<std::uint32_t>(w);
    one.compressor = lamina::gradient_compressor<float>(model_, options_);
    one.compressor.load(saved);
    one.at = phase::idle;
    one.may_arrive = false;
    if (in_.flag()) return;
    // The replica is lost too, and a reply under way.
    publisher_.forget(w);
    one.replica = filled(model_, -777);
    one.reply.clear();
    one.is_stale.assign(model_.layers(), true);
  }

  void finish_step() {
    const auto present = static_cast<std::size_t>(
        std::ranges::count_if(accepted_, [](const auto& each) { return each.has_value(); }));
    check(aggregator_.is_complete() == (present == workers_.size()), "a step has a frame of each");
    if (!aggregator_.is_complete()) {
      check(throws<std::logic_error>([&] { aggregator_.mean(0, [](std::size_t, auto) {}); }),
            "there is no mean of a part");
      if (present > 0 && in_.below(4) != 3) return;  // mostly waits
      check(throws<std::logic_error>([&] { aggregator_.close(); }) == (present == 0),
            "a step closes with a frame, and not without");
    }
    if (present > 0) update(present);
    aggregator_.next_step();
    std::ranges::fill(accepted_, std::nullopt);
  }

  void update(std::size_t present) {
    lamina::selection arrived(model_);
    tensors sum = filled(model_, 0);
    for (const auto& frames : accepted_) {
      if (!frames) continue;
      for (const bytes& frame : *frames) {
        const auto view = lamina::decode<float>(frame, model_);
        receive(sum, view, true);
        for (std::size_t l = 0; l < model_.layers(); ++l) {
          if (!view.is_dropped(l)) arrived.send(l);
        }
      }
    }
    check(std::ranges::equal(arrived.bitmap(), aggregator_.arrived().bitmap()), "what was sent has arrived");
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      aggregator_.mean(l, [&](std::size_t begin, std::span<const float> mean) {
        for (std::size_t i = 0; i < mean.size(); ++i) parameters_[l][begin + i] -= mean[i];
      });
      if (arrived.is_dropped(l)) continue;
      for (std::size_t i = 0; i < sum[l].size(); ++i) {
        const volatile float mean = sum[l][i] / static_cast<float>(present);
        expected_[l][i] -= mean;
      }
      for (worker& each : workers_) each.is_stale[l] = each.is_stale_after[l] = true;
    }
    check(same_tensors(parameters_, expected_), "the mean is over the workers that are there");
    publisher_.update(aggregator_.arrived());
  }

  // A reply arrives at once, later, when there are other updates, or not at all.
  void publish(std::size_t w) {
    worker& one = workers_[w];
    if (!one.reply.empty() && in_.flag()) {
      publisher_.commit(w);
      return reply_arrives(one);
    }
    encode_reply(one,
                 {publisher_
                      .encode(
                          w, aggregator_.step(), [&](std::size_t l) -> const auto& { return parameters_[l]; })
                      .to_bytes()});
    check_published(publisher_.published(w), [&](std::size_t l) { return one.is_stale[l]; });
    if (in_.flag()) return;
    publisher_.commit(w);
    reply_arrives(one);
  }

  void publish_to_all() {
    const auto layer = [&](std::size_t l) -> const auto& {
      return parameters_[l];
    };
    std::vector<bytes> frames;
    if (in_.flag()) {
      frames.push_back(publisher_.encode_for_all(aggregator_.step(), layer).to_bytes());
    } else {
      lamina::selection decided(model_);
      while (in_.flag() && frames.size() < 4) {
        decided.send(in_.below(model_.layers()));
        frames.push_back(publisher_.encode_ready_for_all(aggregator_.step(), decided, layer).to_bytes());
      }
      frames.push_back(publisher_.encode_rest_for_all(aggregator_.step(), layer).to_bytes());
    }
    for (worker& each : workers_) encode_reply(each, frames);
    check_published(publisher_.published_to_all(), [&](std::size_t l) {
      return std::ranges::any_of(workers_, [&](const worker& each) { return each.is_stale[l]; });
    });
    const bool all_arrive = in_.flag();
    for (std::size_t w = 0; w < workers_.size(); ++w) {
      if (!all_arrive && in_.flag()) continue;
      if (!all_arrive) publisher_.commit(w);
      reply_arrives(workers_[w]);
    }
    if (all_arrive) publisher_.commit_all();
  }

  void encode_reply(worker& one, std::vector<bytes> frames) {
    one.reply = std::move(frames);
    one.replied = parameters_;
    one.is_stale_after.assign(model_.layers(), false);
  }

  template <class IsStale>
  void check_published(const lamina::selection& published, const IsStale& is_stale) const {
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      check(published.is_sent(l) == (is_stale(l) && model_.sizes()[l] > 0),
            "a worker gets what it has not heard of, and no more");
    }
  }

  void reply_arrives(worker& one) {
    lamina::step_parts parts(model_);
    for (const bytes& frame : one.reply) {
      const auto view = lamina::decode<float>(frame, model_);
      parts.add(view);
      receive(one.replica, view, false);
    }
    check(parts.is_complete(), "a reply has its last part");
    one.reply.clear();
    one.is_stale = one.is_stale_after;
    check(same_tensors(one.replica, one.replied), "a replica is the server's model");
  }

  static void receive(tensors& to, const lamina::frame_view<float>& frame, bool adds) {
    for (std::size_t l = 0; l < to.size(); ++l) {
      frame.for_each_block(l, [&](std::size_t begin, std::span<const float> block) {
        for (std::size_t i = 0; i < block.size(); ++i) {
          float& element = to[l][begin + i];
          element = adds ? element + block[i] : block[i];
        }
      });
    }
  }

  void check_conservation(std::size_t w) const {
    const worker& one = workers_[w];
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      const auto residual = one.compressor.residual()[l];
      for (std::size_t i = 0; i < residual.size(); ++i) {
        check(one.sent[l][i] + residual[i] == one.computed[l][i], "no gradient is lost or counted twice");
      }
    }
  }

  input& in_;
  std::mt19937 random_;
  lamina::layout model_;
  lamina::compressor_options options_;
  std::vector<std::optional<std::vector<bytes>>>
      accepted_;  // in the server's step, of each worker: its frame, or parts
  lamina::gradient_aggregator<float> aggregator_;
  lamina::parameter_publisher<float> publisher_;
  lamina::frame_encoder<float> encoder_;
  lamina::frame_encoder<float> encoder_of_another_run_;
  tensors parameters_;
  tensors expected_;
  std::vector<worker> workers_;
};

}  // namespace

void fuzz_one(input in) {
  cluster run(in);
  for (int commands = 0; commands < 500 && !in.is_empty(); ++commands) run.command();
  run.check_all();
}

}  // namespace lamina_fuzz
