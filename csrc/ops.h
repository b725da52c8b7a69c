// What ops.cpp offers to python.cpp beyond the registered ops.
#pragma once
#include "kernels/api.h"

namespace torchweld {

const Run& last_run();  // of the calling thread

}  // namespace torchweld
