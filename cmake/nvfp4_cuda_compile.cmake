# Run by the build (cmake -P): compiles LIBRARY from SOURCE with NVCC and FLAGS. When REQUIRED is
# AUTO a failure is reported and the build goes on, without the library.
separate_arguments(_flags UNIX_COMMAND "${FLAGS}")
file(REMOVE "${LIBRARY}")
execute_process(
  COMMAND "${NVCC}" ${_flags} "${SOURCE}" -o "${LIBRARY}.part"
  OUTPUT_VARIABLE _text
  ERROR_VARIABLE _text
  RESULT_VARIABLE _failed)
if(NOT _failed)
  file(RENAME "${LIBRARY}.part" "${LIBRARY}")
elseif(REQUIRED STREQUAL "AUTO")
  message("hotop: nvcc failed; built without the CUDA kernels (HOTOP_CUDA=OFF skips this step, "
    "HOTOP_CUDA=ON makes it an error):\n${_text}")
else()
  message(FATAL_ERROR "nvcc failed:\n${_text}")
endif()
