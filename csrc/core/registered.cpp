// Which plans' operators the dispatcher still has.
#include "registered.h"

#include <mutex>
#include <unordered_map>

namespace hotop {

namespace {

struct Watched {
  std::mutex mutex;
  std::unordered_multimap<c10::OperatorName, Plan*> plans;
};

Watched& watched() {
  static auto* instance = new Watched();  // the dispatcher may outlive static objects
  return *instance;
}

class Listener : public c10::OpRegistrationListener {
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle& op) override {
    const std::lock_guard lock(watched().mutex);
    const auto [begin, end] = watched().plans.equal_range(op.operator_name());
    for (auto found = begin; found != end; ++found) {
      found->second->registered = false;
      found->second->live = false;
    }
  }
};

}  // namespace

void watch_registration(Plan& plan) {
  static const auto* registration = new c10::RegistrationHandleRAII(
      c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>()));
  static_cast<void>(registration);
  const std::lock_guard lock(watched().mutex);
  watched().plans.emplace(plan.schema->operator_name(), &plan);
}

void unwatch_registration(Plan& plan) {
  const std::lock_guard lock(watched().mutex);
  // The schema is the plan's own copy; what the handle names may be gone.
  const auto [begin, end] = watched().plans.equal_range(plan.schema->operator_name());
  for (auto found = begin; found != end; ++found) {
    if (found->second != &plan) continue;
    watched().plans.erase(found);
    return;
  }
}

}  // namespace hotop
