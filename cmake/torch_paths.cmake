# Asks the interpreter's torch for its version, headers and libraries. find_package(Torch) is not
# used: it aborts beside a CUDA wheel on a machine without the toolkit.
set(_ask "
import sys
try:
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths
except ImportError as error:
    sys.exit(f'torch is not importable by {sys.executable}: {error}')
print(torch.__version__.split('+')[0])
print('|'.join(include_paths()))
print('|'.join(library_paths()))
print(int(torch._C._GLIBCXX_USE_CXX11_ABI))
")
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "${_ask}"
  OUTPUT_VARIABLE _answer
  ERROR_VARIABLE _error
  RESULT_VARIABLE _failed
  OUTPUT_STRIP_TRAILING_WHITESPACE)
if(_failed)
  message(FATAL_ERROR "hotop builds against the PyTorch that is installed: ${_error}\n"
    "Install torch first, then: pip install --no-build-isolation .")
endif()
string(REPLACE "\n" ";" _answer "${_answer}")
list(GET _answer 0 TORCH_VERSION)
list(GET _answer 1 TORCH_INCLUDES)
list(GET _answer 2 TORCH_LIBRARY_DIRS)
list(GET _answer 3 TORCH_CXX11_ABI)
string(REPLACE "|" ";" TORCH_INCLUDES "${TORCH_INCLUDES}")
string(REPLACE "|" ";" TORCH_LIBRARY_DIRS "${TORCH_LIBRARY_DIRS}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" TORCH_MINOR "${TORCH_VERSION}")
if(TORCH_VERSION VERSION_LESS 2.13)
  message(FATAL_ERROR "hotop needs PyTorch 2.13 or newer; ${Python_EXECUTABLE} has ${TORCH_VERSION}.")
endif()
