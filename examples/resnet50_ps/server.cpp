// SPDX-License-Identifier: MIT
// What rank 0 does: holds the parameters, takes gradients, and sends each leader the fragments that it has not seen.
#include <lamina/lamina.hpp>
#include <optional>

#include "checkpoint.hpp"
#include "training.hpp"

namespace {

using aggregator_type = lamina::gradient_aggregator<float>;

class server {
 public:
  explicit server(const run& of)
      : of_(of),
        network_((torch::manual_seed(of.with.seed), of.data.train->classes())),
        parameters_(network_.parameters()),
        cut_(lamina::layout_of(network_), of.with.fragment),
        sgd_(parameters_, cut_, of.with.momentum),
        publisher_(cut_.parts(), of.who.leaders.size()),
        down_bytes_(of.who.leaders.size()),
        done_(load()),
        log_(of.title, of.directory, of.with.steps, done_) {
    for (const torch::Tensor& each : sgd_.fragments()) memory_.push_back(torch::empty_like(each));
    std::printf("  %s\n", promise().c_str());
  }

  records serve() {
    of_.with.async ? serve_asynchronously() : serve_in_step();
    step_reports last;
    last.receive_all(of_.who);
    last.log_test(log_, of_.with.steps);
    last.compare(checksum_of(parameters_));
    return std::move(log_);
  }

 private:
  // Waits for all, applies the mean, sends all of them the same frame.
  void serve_in_step() {
    std::vector<std::size_t> workers_of_sender;
    for (const auto& node : of_.who.nodes) workers_of_sender.push_back(node.size());
    auto aggregator = aggregator_type::of_nodes(cut_.parts(), workers_of_sender, {.first_step = done_ + 1});
    std::vector<std::vector<std::byte>> frames(senders());  // the aggregator looks into them
    for (std::uint64_t step = done_ + 1;; ++step) {
      const auto& news = publisher_.encode_for_all(step, fragment_);
      lamina::mpi::send(news, of_.who.leaders, parameters_tag, MPI_COMM_WORLD, of_.who.patience);
      publisher_.commit_all();
      std::ranges::fill(down_bytes_, news.size_bytes());
      if (step > of_.with.steps) return;

      reports_.receive_all(of_.who);
      reports_.log_test(log_, step - 1);
      if (of_.agrees()) agree();
      for (std::size_t s = 0; s < senders(); ++s) {
        lamina::mpi::receive(frames[s], of_.who.leaders[s], gradients_tag, MPI_COMM_WORLD, of_.who.patience);
        take(s, frames[s], aggregator);
      }
      update(aggregator, of_.rate(step));
      finish_step(step);
      if (of_.saves_after(step)) save(step);
    }
  }

  // Applies each frame when it comes, and replies to its sender alone.
  void serve_asynchronously() {
    std::vector<aggregator_type> aggregators;  // each sender has a step of its own
    for (std::size_t s = 0; s < senders(); ++s) {
      aggregators.push_back(aggregator_type::of_workers(cut_.parts(), 1));
      reply(s, 1);
    }
    std::vector<std::uint64_t> done(senders(), 0);
    std::vector<bool> is_due(senders(), false);  // a reply that --staleness holds back
    std::vector<std::byte> frame;
    for (std::uint64_t applied = 0; applied < of_.with.steps * senders();) {
      const std::size_t s = next_sender();
      lamina::mpi::receive(frame, of_.who.leaders[s], gradients_tag, MPI_COMM_WORLD, of_.who.patience);
      for (const int worker : of_.who.nodes[s]) reports_.receive(worker, of_.who);
      take(s, frame, aggregators[s]);
      // A frame is the sum over the workers of its node, and all of them together move the parameters as far as a step does.
      update(aggregators[s], of_.rate(applied / senders() + 1) / of_.who.workers);
      if (++applied % senders() == 0) finish_step(applied / senders());

      is_due[s] = ++done[s] < of_.with.steps;
      waits_since_[s].reset();
      for (std::size_t other = 0; other < senders(); ++other) {
        if (!is_due[other] || done[other] - *std::ranges::min_element(done) > of_.with.staleness) continue;
        reply(other, done[other] + 1);
        is_due[other] = false;
      }
    }
    for (std::size_t s = 0; s < senders(); ++s) reply(s, of_.with.steps + 1);  // what all have led to
  }

  void reply(std::size_t s, std::uint64_t step) {
    const auto& news = publisher_.encode(s, step, fragment_);
    lamina::mpi::send(news, of_.who.leaders[s], parameters_tag, MPI_COMM_WORLD, of_.who.patience);
    publisher_.commit(s);
    down_bytes_[s] = news.size_bytes();
    waits_since_[s] = clock_type::now();
  }

  // Of which sender a frame has come. Throws where one has been silent for too long, whatever the others send.
  std::size_t next_sender() {
    for (;;) {
      std::size_t longest = 0;
      for (std::size_t s = 0; s < senders(); ++s) {
        if (waits_since_[s] && (!waits_since_[longest] || *waits_since_[s] < *waits_since_[longest]))
          longest = s;
      }
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          *waits_since_[longest] + of_.who.patience - clock_type::now());
      const bool is_over = left.count() <= 0;
      try {
        return of_.who.sender(
            lamina::mpi::wait_for_message(is_over ? of_.who.leaders[longest] : MPI_ANY_SOURCE, gradients_tag,
                                          MPI_COMM_WORLD, is_over ? std::chrono::milliseconds(0) : left));
      } catch (const lamina::mpi::timeout_error&) {
        if (is_over) throw lamina::mpi::timeout_error(of_.who.leaders[longest], "");
      }
    }
  }

  // The mean of the leaders' values, the same for all of them.
  void agree() {
    std::vector<double> sum(cut_.parts().layers()), own(sum.size());
    for (const int leader : of_.who.leaders) {
      const auto bytes = lamina::mpi::receive(leader, values_tag, MPI_COMM_WORLD, of_.who.patience);
      std::memcpy(own.data(), bytes.data(), bytes.size());
      for (std::size_t f = 0; f < sum.size(); ++f) sum[f] += own[f] / of_.who.workers;
    }
    lamina::mpi::send(std::as_bytes(std::span(sum)), of_.who.leaders, agreed_tag, MPI_COMM_WORLD,
                      of_.who.patience);
  }

  void take(std::size_t s, std::span<const std::byte> frame, aggregator_type& into) {
    const auto begin = clock_type::now();
    into.add(lamina::decode<float>(frame, cut_.parts()));
    record_.server_seconds += seconds_since(begin);
    record_.up_bytes += static_cast<double>(frame.size()) / static_cast<double>(senders());
    record_.down_bytes += static_cast<double>(down_bytes_[s]) / static_cast<double>(senders());
  }

  void update(aggregator_type& gradients, double rate) {
    const auto begin = clock_type::now();
    std::vector<torch::Tensor> means(memory_.size());
    for (std::size_t f = 0; f < means.size(); ++f) {
      if (gradients.arrived().is_dropped(f)) continue;  // no gradient, no update
      means[f] = memory_[f];
      gradients.mean(f, [&](std::size_t first, std::span<const float> mean) {
        std::ranges::copy(mean, means[f].data_ptr<float>() + first);
      });
    }
    sgd_.step(means, rate);
    publisher_.update(gradients.arrived());
    gradients.next_step();
    record_.server_seconds += seconds_since(begin);
  }

  void finish_step(std::uint64_t step) {
    record_.step = step;
    record_.seconds = seconds_since(begin_);
    reports_.put_into(record_);
    log_.add(record_, cut_.model().elements() * sizeof(float));
    begin_ = clock_type::now();
    record_ = {};
    reports_ = {};
  }

  std::size_t senders() const { return of_.who.leaders.size(); }

  std::string promise() const {
    const auto all = static_cast<double>(cut_.model().elements());
    std::ostringstream text;
    text << std::setprecision(3);
    if (of_.drop_ratio == 0 || of_.drop_ratio == 1) {
      text << "all of " << all / 1e6 << " million elements are sent in each step";
    } else {
      text << 100 - 100 * of_.drop_ratio << " % of " << all / 1e6 << " million elements, and at most one of "
           << cut_.parts().layers() << " fragments more ("
           << 100 * static_cast<double>(std::ranges::max(cut_.parts().sizes())) / all
           << " %), are sent in each step" << (of_.with.refresh > 1 ? " that searches a threshold" : "");
    }
    return text.str();
  }

  std::string file() const { return of_.directory + "/checkpoint.pt"; }

  void save(std::uint64_t step) {
    torch::serialize::OutputArchive archive, optimizer;
    network_.save(archive);
    sgd_.state().save(optimizer);
    archive.write("optimizer", optimizer);
    archive.write("step", c10::IValue(static_cast<std::int64_t>(step)));
    archive.write("options",
                  c10::IValue(of_.with.in_common() + " workers=" + std::to_string(of_.who.workers)));
    for (int rank = 1; rank <= of_.who.workers; ++rank) {
      const auto state = lamina::mpi::receive(rank, state_tag, MPI_COMM_WORLD, of_.who.patience);
      archive.write("worker" + std::to_string(rank), tensor_of(state));
    }
    std::ostringstream stream;
    archive.save_to(stream);
    replace_file(file(), std::move(stream).str());
    begin_ = clock_type::now();
  }

  // Goes on from the checkpoint, if --resume says so and there is one, and gives each worker its part. Returns the steps done.
  std::uint64_t load() try {
    const ranks& who = of_.who;
    std::uint64_t done = 0;
    if (!of_.with.resume || !std::filesystem::exists(file())) {
      for (int rank = 1; rank <= who.workers; ++rank)
        lamina::mpi::send(std::span<const std::byte>(), rank, state_tag, MPI_COMM_WORLD, who.patience);
      return done;
    }
    torch::serialize::InputArchive archive, optimizer;
    archive.load_from(file());
    c10::IValue step, made_with;
    archive.read("options", made_with);
    const std::string common = of_.with.in_common() + " workers=" + std::to_string(who.workers);
    if (made_with.toStringRef() != common)
      throw std::runtime_error("was made with " + made_with.toStringRef() + ", this run has " + common);
    archive.read("step", step);
    done = static_cast<std::uint64_t>(step.toInt());
    network_.load(archive);
    archive.read("optimizer", optimizer);
    sgd_.state().load(optimizer);
    for (int rank = 1; rank <= who.workers; ++rank) {
      torch::Tensor state;
      archive.read("worker" + std::to_string(rank), state);
      lamina::mpi::send(bytes_of(state), rank, state_tag, MPI_COMM_WORLD, who.patience);
      lamina::mpi::send(std::as_bytes(std::span(&done, 1)), rank, state_tag, MPI_COMM_WORLD, who.patience);
    }
    return done;
  } catch (const c10::Error& error) {
    throw std::runtime_error(file() + " is damaged: " + error.what_without_backtrace());
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(file() + ": " + error.what());
  }

  const run& of_;
  resnet50 network_;
  std::vector<torch::Tensor> parameters_;
  lamina::partition cut_;
  fragment_sgd sgd_;
  lamina::parameter_publisher<float> publisher_;
  std::vector<std::size_t> down_bytes_;  // of the last reply to each sender
  std::uint64_t done_;
  records log_;
  std::vector<torch::Tensor> memory_;  // of the mean gradients
  std::vector<std::optional<clock_type::time_point>> waits_since_{of_.who.leaders.size()};  // for each sender
  step_record record_;  // of the step under way
  step_reports reports_;
  clock_type::time_point begin_ = clock_type::now();
  const std::function<std::span<const float>(std::size_t)> fragment_ = [this](std::size_t f) {
    return lamina::elements_of<float>(sgd_.fragments()[f]);
  };
};

}  // namespace

records serve(const run& of) {
  return server(of).serve();
}
