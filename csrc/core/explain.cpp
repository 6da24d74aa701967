// The gate's verdict on a call, in words.
#include "explain.h"

#include <string>

#include "boxed.h"
#include "gate.h"
#include "slot.h"

namespace hotop {

namespace {

// "argument 2 ('x')"
std::string argument_name(const Plan& plan, int position) {
  return "argument " + std::to_string(position) + " ('" +
         PyUnicode_AsUTF8(plan.arguments[position].name.get()) + "')";
}

std::string words(const Plan& plan, const Verdict& verdict, PyObject* blamed) {
  const auto named = [&] { return argument_name(plan, verdict.position); };
  switch (verdict.reason) {
    case Reason::Direct:
      return "";
    case Reason::NoPlan:
      return plan.unsupported;
    case Reason::ArgumentCount:
      return "the number of positional arguments does not fit the schema";
    case Reason::UnknownKeyword:
      return "a keyword is not an argument of the schema";
    case Reason::RepeatedArgument:
      return named() + " is given twice";
    case Reason::MissingArgument:
      return named() + " is missing";
    case Reason::Value: {
      const char* article = blamed != nullptr ? Py_TYPE(blamed)->tp_name : "missing";
      return named() + " is a " + article + ", which PyTorch has to look at, convert or refuse";
    }
    case Reason::RequiresGrad:
      return "grad mode is on and " + named() + " requires grad";
    case Reason::Tangent:
      return named() + " has a forward-mode tangent";
    case Reason::DispatchKey:
      return std::string("the dispatcher has work at the key ") + c10::toString(verdict.key) +
             " (a mode, a wrapped or special Tensor, a rule or an overriding kernel), or no "
             "kernel of this op serves it";
    case Reason::BackendSelect:
      return "no kernel is registered for the given device";
    case Reason::Autocast:
      return "an autocast rule meets a device context or keyword-only arguments";
    case Reason::FunctionMode:
      return "a torch function mode is active";
    case Reason::DynamoCallback:
      return "Dynamo's frame callback is active in this thread";
  }
  return "";
}

// explain(slot, args, kwargs) -> None when the call is direct, else (road, reason).
PyObject* explain(PyObject*, PyObject* arguments) {
  PyObject* object = nullptr;
  PyObject* args = nullptr;
  PyObject* kwargs = nullptr;
  if (!PyArg_ParseTuple(arguments, "OO!O!:explain", &object, &PyTuple_Type, &args, &PyDict_Type,
                        &kwargs) ||
      !is_slot(object)) {
    return nullptr;
  }
  auto* slot = reinterpret_cast<Slot*>(object);
  const Py_ssize_t nargs = PyTuple_GET_SIZE(args);
  const Py_ssize_t nkeywords = PyDict_GET_SIZE(kwargs);
  std::vector<PyObject*> values(nargs + nkeywords + 1);
  for (Py_ssize_t i = 0; i < nargs; ++i) values[i] = PyTuple_GET_ITEM(args, i);
  PyRef names;
  if (nkeywords > 0) {
    names = unpack_keywords(kwargs, values.data() + nargs);
    if (!names) return nullptr;
  }
  Slot chosen = *slot;
  if (slot->plan != nullptr && PyTuple_CheckExact(slot->plan)) {
    chosen = resolved_slot(*slot, values.data(), nargs, names.get());
  }
  if (chosen.plan == nullptr || !Py_IS_TYPE(chosen.plan, PlanType)) {
    return Py_BuildValue("ss", "pytorch",
                         "PyTorch chooses among several overloads, or the schema has a type that "
                         "only it handles");
  }
  const auto plan_alive = PyRef::borrow(chosen.plan);  // the gate may run Python code
  Plan& plan = *reinterpret_cast<PlanObject*>(chosen.plan)->plan;
  if (chosen.vectorcall == call_slow) {
    const bool boxed = can_call_boxed(plan, values.data(), nargs, names.get());
    return Py_BuildValue("ss", boxed ? "boxed" : "pytorch",
                         boxed ? "its kernels are not in Python"
                               : "a value, a keyword or a mode is one that PyTorch has to look at");
  }
  Call call;
  Verdict verdict;
  if (prepare(plan, &call, values.data(), nargs, names.get(), &verdict)) Py_RETURN_NONE;
  if (PyErr_Occurred()) return nullptr;
  const bool boxed = can_call_boxed(plan, values.data(), nargs, names.get());
  PyObject* blamed = verdict.position >= 0 && verdict.reason == Reason::Value
                         ? call.values[verdict.position]
                         : nullptr;
  return Py_BuildValue("ss", boxed ? "boxed" : "pytorch", words(plan, verdict, blamed).c_str());
}

}  // namespace

PyMethodDef explain_functions[] = {
    {"explain", explain, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace hotop
