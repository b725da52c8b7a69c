// Activations on registers: each row of activations.inc as a function.
#pragma once
#include "vector_math.h"
// The formulas call what vector_math.h has, so they come after it.
#include "activation_formulas.h"
