// Which plans' operators the dispatcher still has.
#pragma once

#include "plan.h"

namespace hotop {

// From now on `plan.registered` turns false when the dispatcher forgets the operator: then its
// handle may not be used any more.
void watch_registration(Plan& plan);
void unwatch_registration(Plan& plan);

}  // namespace hotop
