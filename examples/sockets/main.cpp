// SPDX-License-Identifier: MIT
// A parameter server and two workers over TCP, both directions compressed. They are threads of one program, with nothing
// but sockets between them.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <exception>
#include <future>
#include <lamina/lamina.hpp>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace {

using tensors = std::vector<std::vector<float>>;  // one for each layer

constexpr std::uint64_t steps = 100;
constexpr std::size_t workers = 2;
constexpr float learning_rate = 0.1F;

const lamina::layout model = [] {
  std::vector<lamina::layer> layers;
  for (std::size_t k = 1; k <= 12; ++k) layers.push_back({"layer " + std::to_string(k), {100 * k, 10}});
  return lamina::layout(layers);
}();

tensors zeros() {
  tensors all;
  for (const std::size_t size : model.sizes()) all.emplace_back(size);
  return all;
}

template <class Result>
Result checked(Result result, const char* call) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), call);
  return result;
}

// Closed on the way out of an exception too, so that the peer does not wait.
class tcp_socket {
 public:
  explicit tcp_socket(int descriptor) : descriptor_(descriptor) {}
  tcp_socket(tcp_socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  tcp_socket& operator=(tcp_socket&&) = delete;
  ~tcp_socket() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

tcp_socket make_socket() {
  return tcp_socket(checked(socket(AF_INET, SOCK_STREAM, 0), "socket"));
}

sockaddr_in loopback(in_port_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = port;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// A frame is complete when it is sent: the kernel need not wait for more.
void set_no_delay(const tcp_socket& connection) {
  const int on = 1;
  checked(setsockopt(connection.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on), "setsockopt");
}

// All segments in one call, from where they lie. A call for each would make a packet of each.
void send_frame(const tcp_socket& to, std::span<const std::span<const std::byte>> segments) {
  std::vector<iovec> rest;
  for (const auto segment : segments) {
    rest.push_back({const_cast<std::byte*>(segment.data()), segment.size()});  // sendmsg() only reads
  }
  for (std::size_t first = 0; first < rest.size();) {
    msghdr message{};
    message.msg_iov = &rest[first];
    message.msg_iovlen = std::min<std::size_t>(rest.size() - first, IOV_MAX);
    // MSG_NOSIGNAL: a peer that is gone is an error of this call, and not the end of the program.
    auto sent = static_cast<std::size_t>(checked(sendmsg(to.get(), &message, MSG_NOSIGNAL), "sendmsg"));
    for (; first < rest.size() && sent >= rest[first].iov_len; ++first) sent -= rest[first].iov_len;
    if (sent > 0) {  // only a part of this segment
      rest[first].iov_base = static_cast<std::byte*>(rest[first].iov_base) + sent;
      rest[first].iov_len -= sent;
    }
  }
}

void read_all(const tcp_socket& from, std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t got = checked(recv(from.get(), bytes.data(), bytes.size(), 0), "recv");
    if (got == 0) throw std::runtime_error("the peer is gone");
    bytes = bytes.subspan(static_cast<std::size_t>(got));
  }
}

// The first bytes of a frame say how long it is.
std::vector<std::byte> receive_frame(const tcp_socket& from) {
  std::vector<std::byte> bytes(lamina::peek_bytes);
  read_all(from, bytes);
  std::error_code error;
  const std::size_t size = lamina::peek(bytes, error).size_bytes;
  if (error) throw std::system_error(error);
  if (size > lamina::largest_frame_bytes<float>(model)) {
    throw std::runtime_error("the peer announces more than the model holds");
  }
  bytes.resize(size);
  read_all(from, std::span(bytes).subspan(lamina::peek_bytes));
  return bytes;
}

// The gradient draws every parameter towards 1, with noise that each worker has of its own.
tensors work(std::uint32_t index, in_port_t port) {
  const tcp_socket server = make_socket();
  const sockaddr_in address = loopback(port);
  checked(connect(server.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), "connect");
  set_no_delay(server);

  std::mt19937 random(index);
  std::normal_distribution<float> noise(0, 0.1F);
  tensors parameters = zeros();
  tensors gradients = zeros();
  lamina::worker<float> worker(model, {.drop_ratio = 0.9, .sender = index});
  for (;;) {
    const std::vector<std::byte> bytes = receive_frame(server);
    worker.apply(bytes, parameters);
    if (worker.steps() == steps) return parameters;

    for (std::size_t l = 0; l < model.layers(); ++l) {
      for (std::size_t i = 0; i < gradients[l].size(); ++i)
        gradients[l][i] = parameters[l][i] - 1 + noise(random);
    }
    auto step = worker.add(gradients);
    send_frame(server, step.frame().segments());
    step.commit();  // the kernel has taken all: only now is what was sent cleared
  }
}

double loss_of(const tensors& parameters) {
  double sum = 0;
  for (const auto& layer : parameters) {
    for (const float each : layer) sum += 0.5 * (each - 1) * (each - 1);
  }
  return sum / static_cast<double>(model.elements());
}

// The workers have seen the same, so that it does not matter which connection is whose.
tensors serve(const std::vector<tcp_socket>& connections) {
  tensors parameters = zeros();
  lamina::server<float> server(model, {.workers = workers});
  double up = 0;
  double down = 0;
  for (;;) {
    for (const std::size_t w : server.workers()) {
      const auto reply = server.reply(w, parameters);  // the whole model at first, later what has changed
      send_frame(connections[w], reply.segments());
      server.commit(w, reply.clock());
      down += static_cast<double>(reply.size_bytes());
    }
    const std::uint64_t step = server.step();
    if (step > steps) return parameters;

    for (const tcp_socket& each : connections) {
      std::vector<std::byte> frame = receive_frame(each);
      up += static_cast<double>(frame.size());
      if (const auto error = server.add(std::move(frame))) throw std::system_error(error);
    }
    server.update([&](std::size_t layer, std::size_t begin, std::span<const float> mean) {
      for (std::size_t i = 0; i < mean.size(); ++i) parameters[layer][begin + i] -= learning_rate * mean[i];
    });
    if (step != 1 && step % 20 != 0) continue;
    const double percent = static_cast<double>(step * model.elements() * sizeof(float) * workers) / 100;
    std::printf("step %3d: loss %.4f, so far %.1f %% of the dense bytes up and %.1f %% down\n",
                static_cast<int>(step), loss_of(parameters), up / percent, down / percent);
  }
}

}  // namespace

int main() try {
  const tcp_socket listener = make_socket();
  sockaddr_in address = loopback(0);  // at a port that is free
  socklen_t size = sizeof address;
  checked(bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), size), "bind");
  checked(listen(listener.get(), workers), "listen");
  checked(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size), "getsockname");

  std::vector<std::future<tensors>> replicas;
  for (std::uint32_t w = 0; w < workers; ++w) {
    replicas.push_back(std::async(std::launch::async, work, w, address.sin_port));
  }
  std::vector<tcp_socket> connections;
  while (connections.size() < workers) {
    set_no_delay(connections.emplace_back(checked(accept(listener.get(), nullptr, nullptr), "accept")));
  }
  const tensors parameters = serve(connections);
  bool is_equal = true;
  for (auto& each : replicas) is_equal &= each.get() == parameters;
  const double loss = loss_of(parameters);
  std::printf("loss %.4f at the end, replicas %s\n", loss, is_equal ? "equal" : "DIFFER");
  return is_equal && loss < 0.05 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
