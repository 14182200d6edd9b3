// SPDX-License-Identifier: MIT
// Trains ResNet-50 by layer dropping (Lee et al. 2020). Rank 0 is the server, see server.cpp, the others are workers, see worker.cpp.
#include <thread>

#include "training.hpp"

namespace {

const char* const help_text =
#include "help.txt"
    ;

// All that a run may be refused for. Throws std::runtime_error.
data_sets prepare(const options& with, const ranks& who) {
  if (who.workers == 0) throw std::runtime_error("rank 0 is the server: start at least two ranks");
  if (with.workers != 0 && with.workers != who.workers)
    throw std::runtime_error("--workers is " + std::to_string(with.workers) + ", but mpirun has started " + std::to_string(who.workers));
  if (with.fragment % 4096 != 0) throw std::runtime_error("--fragment must be a multiple of 4096");
  if ((with.checkpoint_every > 0 || with.resume) && std::ranges::find(with.runs, "allreduce") != with.runs.end())
    throw std::runtime_error("the plain allreduce has no checkpoints: choose others with --runs, such as 0,0.95");
  if (who.is_server() && !with.output.empty()) {
    std::filesystem::create_directories(with.output);
    if (std::filesystem::is_empty(with.output) == with.resume)
      throw std::runtime_error(with.output +
                               (with.resume ? " has nothing to --resume" : " has files: give another --output, or go on with --resume"));
  }
  data_sets data = open_data(with.data, with.image_size, with.seed);
  batch_of_step(1, *data.train, 0, static_cast<std::size_t>(who.workers), with.batch, with.seed);  // refuses too few images, or bad ones
  return data;
}

int train(const options& with) {
  const ranks who(with.workers_per_node, std::chrono::seconds(with.timeout));
  torch::set_num_threads(with.threads > 0  ? with.threads
                         : who.is_server() ? 1  // it works while they wait
                                           : std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / std::max(1, who.workers)));
  data_sets data;
  std::string problem;
  try {
    data = prepare(with, who);
  } catch (const std::exception& error) {
    problem = error.what();
  }
  int first = problem.empty() ? who.workers + 1 : who.rank;  // of those who refuse: it says why, and all end
  MPI_Allreduce(MPI_IN_PLACE, &first, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  if (first == who.rank) std::fprintf(stderr, "resnet50_ps: %s\n", problem.c_str());
  if (first <= who.workers) return 2;

  if (who.is_server()) {
    std::printf("ResNet-50, %s: %zu training and %zu test images, %lld classes; %d workers x %zu images a step\n", with.data.c_str(),
                data.train->size(), data.test->size(), static_cast<long long>(data.train->classes()), who.workers, with.batch);
  }
  std::vector<records> results;
  for (const std::string& which : with.runs) {
    const bool is_dense = which == "allreduce";
    const std::string directory = with.output.empty() ? "" : with.output + (is_dense ? "/" : "/R-") + which;
    const run of = {.with = with,
                    .who = who,
                    .data = data,
                    .drop_ratio = is_dense ? 0 : std::stod(which),
                    .title = is_dense ? "plain MPI_Allreduce" : "R = " + which,
                    .directory = directory};
    if (who.is_server())
      results.push_back(is_dense ? watch_allreduce(of) : serve(of));
    else
      is_dense ? work_by_allreduce(of) : work(of);
  }
  if (!results.empty()) records::print_head();
  for (std::size_t i = 0; i < results.size(); ++i) results[i].print_row(!with.async || with.runs[i] == "allreduce");
  return 0;
}

void give_up(int rank, const std::string& sentence) {
  std::fprintf(stderr, "resnet50_ps: %s: %s\n", name_of(rank).c_str(), sentence.c_str());
  std::fflush(nullptr);
  MPI_Abort(MPI_COMM_WORLD, 1);  // the others wait for this one
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a line is read when it is printed, by whatever
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  int code = 0;
  options with;
  CLI::App app("resnet50_ps");
  app.set_help_flag();
  const auto* help = app.add_flag("-h,--help");
  try {
    add_options(app, with);
    app.parse(argc, argv);
    if (!*help) code = train(with);
    if (*help && rank == 0) std::printf("%s", help_text);
  } catch (const CLI::ParseError& error) {
    if (rank == 0) std::fprintf(stderr, "resnet50_ps: %s\n", error.what());
    code = 2;
  } catch (const lamina::mpi::timeout_error& error) {
    give_up(rank, name_of(error.rank()) + " has said nothing within --timeout, " + std::to_string(with.timeout) + " s");
  } catch (const std::exception& error) {  // of which torch's have a page of addresses after the sentence
    const std::string sentence = error.what();
    give_up(rank, sentence.substr(0, sentence.find('\n')));
  }
  MPI_Finalize();
  return code;
}
