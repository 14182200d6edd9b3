// SPDX-License-Identifier: MIT
// Inputs to begin with: frames and states as the library writes them, those of one small model in every way in which bytes can be bad,
// and for the targets that take choices some bytes of any kind. As a program by itself it writes them: seeds DIRECTORY
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>

#include "fuzz.hpp"
#include "lamina/worker.hpp"

namespace lamina_fuzz::of_seeds {
namespace {

using taker = std::function<void(const std::string& target, const std::string& name, const bytes& input)>;
taker take;

void write(const std::string& target, const std::string& name, const std::vector<int>& choices,
           const bytes& rest) {
  bytes all;
  for (const int each : choices) all.push_back(static_cast<std::byte>(each));
  all.insert(all.end(), rest.begin(), rest.end());
  take(target, name, all);
}

struct field {
  const char* name;
  std::size_t offset, width;  // in bytes
};

using lamina::detail::state_header;
using lamina::detail::wire_header;
#define LAMINA_FIELD(header, name)                      \
  field {                                               \
#name, offsetof(header, name), sizeof(header::name) \
  }

constexpr std::array frame_fields = {
    LAMINA_FIELD(wire_header, magic),        LAMINA_FIELD(wire_header, version),
    LAMINA_FIELD(wire_header, element_type), LAMINA_FIELD(wire_header, kind),
    LAMINA_FIELD(wire_header, flags),        LAMINA_FIELD(wire_header, sender),
    LAMINA_FIELD(wire_header, step),         LAMINA_FIELD(wire_header, fingerprint),
    LAMINA_FIELD(wire_header, layers),       LAMINA_FIELD(wire_header, payload_bytes),
    LAMINA_FIELD(wire_header, payload_type), LAMINA_FIELD(wire_header, sequence),
    LAMINA_FIELD(wire_header, user_bytes),   LAMINA_FIELD(wire_header, run),
    LAMINA_FIELD(wire_header, reserved),     LAMINA_FIELD(wire_header, checksum)};
constexpr std::array state_fields = {
    LAMINA_FIELD(state_header, magic),        LAMINA_FIELD(state_header, version),
    LAMINA_FIELD(state_header, element_type), LAMINA_FIELD(state_header, flags),
    LAMINA_FIELD(state_header, fingerprint),  LAMINA_FIELD(state_header, layers),
    LAMINA_FIELD(state_header, elements),     LAMINA_FIELD(state_header, step),
    LAMINA_FIELD(state_header, threshold),    LAMINA_FIELD(state_header, allowance),
    LAMINA_FIELD(state_header, checksum)};

// The numbers around which sizes wrap, as far as they go into the field.
std::vector<std::uint64_t> limits_of(std::size_t width) {
  const std::uint64_t largest = ~std::uint64_t{0} >> (64 - 8 * width);
  std::vector<std::uint64_t> values;
  for (const std::uint64_t each :
       {std::uint64_t{0}, std::uint64_t{1}, (std::uint64_t{1} << 31U) - 1, std::uint64_t{1} << 31U,
        (std::uint64_t{1} << 31U) + 1, (std::uint64_t{1} << 32U) - 1, std::uint64_t{1} << 32U,
        std::uint64_t{1} << 62U, std::uint64_t{1} << 63U, largest}) {
    if (each <= largest) values.push_back(each);
  }
  return values;
}

// `good` cut off, with more behind it, and with each bit another; and the fields of its header at their limits. `choices`
// are those of the target, of which number `mends` has the checksum mended, so that the bit or the field itself is looked at.
void write_bad(const std::string& target, std::vector<int> choices, std::size_t mends, const bytes& good,
               std::span<const field> fields) {
  for (std::size_t size = 0; size < good.size(); ++size) {
    write(target, "truncated_to_" + std::to_string(size), choices,
          bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size)));
  }
  bytes longer = good;
  longer.push_back(std::byte{0});
  write(target, "trailing", choices, longer);
  for (const std::string when : {"", "_mended"}) {
    for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
      bytes flipped = good;
      flipped[bit / 8] ^= std::byte{1} << (bit % 8);
      write(target, "bit_" + std::to_string(bit) + when, choices, flipped);
    }
    for (const field& each : fields) {
      for (const std::uint64_t value : limits_of(each.width)) {
        bytes other = good;
        std::memcpy(other.data() + each.offset, &value, each.width);
        write(target, std::string(each.name) + "_" + std::to_string(value) + when, choices, other);
      }
    }
    ++choices[mends];
  }
}

// The two frames of a step; of a small model every way in which they are bad, too.
template <class T>
void write_several(int type, int which, const lamina::layout& model, lamina::payload_type payload,
                   const std::string& name) {
  const std::vector<T> ones(5000, T(1));
  const bytes user(3, std::byte{7});
  lamina::frame_encoder<T> encoder(model);
  for (const bool is_last : {false, true}) {
    lamina::selection sent(model);
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if ((l == 0) != is_last) sent.send(l);
    }
    const bytes frame =
        encoder
            .encode({.step = 3,
                     .sender = 1,
                     .payload = payload,
                     .sequence = static_cast<std::uint16_t>(is_last ? 1 : 0),
                     .is_last = is_last,
                     .user = user},
                    sent, [&](std::size_t l) { return std::span(ones).first(model.sizes()[l]); })
            .to_bytes();
    write("decode", name + (is_last ? "_last" : "_first"), {type, which, 0, 0}, frame);
    if (type == 0 && which == 1 && !is_last && payload == lamina::payload_type::as_is) {
      for (std::size_t bit = 0; bit < 8 * frame.size(); ++bit) {
        bytes flipped = frame;
        flipped[bit / 8] ^= std::byte{1} << (bit % 8);
        write("decode", "first_bit_" + std::to_string(bit) + "_mended", {type, which, 1, 0}, flipped);
      }
    }
  }
}

template <class T>
void write_frames_and_states(int type) {
  for (const int which : {0, 1}) {
    const std::byte choice{static_cast<unsigned char>(which)};
    input in(std::span(&choice, 1));
    const lamina::layout& model = some_model(in);
    for (int payload = 0; payload < 4; ++payload) {
      std::mt19937 random(7);
      lamina::worker_options options;
      options.drop_ratio = 0.5;
      options.payload = static_cast<lamina::payload_type>(payload);
      if (payload % 2 == 1) options.momentum = 0.5;
      lamina::worker<T> worker(model, options);
      bytes frame;
      for (int t = 0; t < 2; ++t) {
        std::vector<std::vector<T>> gradients;
        for (const std::size_t size : model.sizes())
          gradients.push_back(lamina_test::random_fractions<T>(random, size));
        auto step = worker.add(gradients);
        frame = step.frame().to_bytes();
        step.commit();
      }
      const std::string name = std::string(type == 1 ? "double" : "float") + "_model" +
                               std::to_string(which) + "_payload" + std::to_string(payload);
      write("decode", name, {type, which, 0, 0}, frame);
      for (const bool is_gradient : {true, false}) {
        const std::vector<T> zeros(100);
        lamina::frame_encoder<T> of_a_run(model, 9);
        lamina::selection some(model);
        some.send(0);
        const auto kind = is_gradient ? lamina::frame_kind::gradients : lamina::frame_kind::parameters;
        const auto layer = [&](std::size_t l) { return std::span(zeros).first(model.sizes()[l]); };
        write("decode", name + (is_gradient ? "_gradients" : "_parameters") + "_of_a_run",
              {type, which, 0, 0},
              of_a_run.encode({.kind = kind, .step = 3, .sender = 1, .payload = options.payload}, some, layer)
                  .to_bytes());
      }
      std::vector<int> choices = {type, which, payload % 2, 0, 1, 0};
      choices.resize(choices.size() + 32);
      const bytes state = worker.save();
      write("state", name, choices, state);
      write_several<T>(type, which, model, options.payload, name);
      if (type == 0 && which == 1 && payload < 2) {
        if (payload == 0) write_bad("decode", {type, which, 0, 0}, 2, frame, frame_fields);
        if (payload == 1) write_bad("state", choices, 5, state, state_fields);
      }
    }
  }
}

}  // namespace

// Calls `all` with each.
inline void for_each_seed(const taker& all) {
  take = all;
  write_frames_and_states<float>(0);
  write_frames_and_states<double>(1);
  for (const std::string target : {"round_trip", "options", "cluster", "packet", "control", "transfer"}) {
    std::mt19937 random(11);
    for (const std::size_t size : {16, 64, 256, 1000}) {
      bytes any(size);
      for (std::byte& each : any) each = static_cast<std::byte>(random());
      write(target, "any_" + std::to_string(size), {}, any);
    }
  }
}

}  // namespace lamina_fuzz::of_seeds

#ifndef LAMINA_FUZZ_REPLAY
int main(int count, char** arguments) {
  if (count != 2) return 1;
  const std::filesystem::path root = arguments[1];
  lamina_fuzz::of_seeds::for_each_seed([&](const auto& target, const auto& name, const auto& input) {
    std::filesystem::create_directories(root / target);
    std::ofstream(root / target / name, std::ios::binary)
        .write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
  });
}
#endif
