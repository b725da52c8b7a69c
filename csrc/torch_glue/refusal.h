// The exception that our ops throw for arguments they do not accept.
#pragma once
#include <c10/util/Exception.h>

namespace torchweld {

// Python sees a ValueError. It has its own type so that a caller with a fallback can tell it from
// exceptions of other code that ran during the call: hooks of saved tensors, modes, signal
// handlers.
class Refusal : public c10::ValueError {
  using c10::ValueError::ValueError;
};

}  // namespace torchweld

// Throws a Refusal unless the condition holds. The other arguments make the message.
#define TORCHWELD_CHECK(condition, ...)                                                            \
  do {                                                                                             \
    if (!(condition)) [[unlikely]]                                                                 \
      throw ::torchweld::Refusal({__func__, __FILE__, uint32_t(__LINE__)}, c10::str(__VA_ARGS__)); \
  } while (false)
