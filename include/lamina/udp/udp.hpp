// SPDX-License-Identifier: MIT
#pragma once

/// All of lamina/udp: transfers of bounded loss over the sockets of Linux. In reading order: address.hpp, socket.hpp,
/// control.hpp, meeting.hpp, peer.hpp, transport.hpp; each includes the one before it, and what that does not bring. A program needs parse_addresses(), open_sockets, transport_options and transport.

#include "lamina/udp/address.hpp"
#include "lamina/udp/control.hpp"
#include "lamina/udp/meeting.hpp"
#include "lamina/udp/peer.hpp"
#include "lamina/udp/socket.hpp"
#include "lamina/udp/transport.hpp"
