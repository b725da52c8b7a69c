// The exception by which an op of ours says that it does not take what it was given.
#pragma once
#include <c10/util/Exception.h>

namespace torchweld {

// A ValueError to everyone; a type of its own, so that whoever has another way to go can tell it from the
// exceptions of foreign code that ran meanwhile: hooks of saved tensors, modes, signal handlers.
class Refusal : public c10::ValueError {
  using c10::ValueError::ValueError;
};

}  // namespace torchweld

// Refuses, with a message made of what follows the condition, unless the condition holds.
#define TORCHWELD_CHECK(condition, ...)                                                            \
  do {                                                                                             \
    if (!(condition)) [[unlikely]]                                                                 \
      throw ::torchweld::Refusal({__func__, __FILE__, uint32_t(__LINE__)}, c10::str(__VA_ARGS__)); \
  } while (false)
