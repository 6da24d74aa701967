# Builds hotop/_nvfp4_cuda.so, the NVFP4 kernels for NVIDIA GPUs, where nvcc is found. Not yet run
# on hardware. HOTOP_CUDA: AUTO (build it if nvcc works, never fail), ON (must build), OFF.
# A custom command and not enable_language(CUDA): that one fails the whole configure step beside an
# nvcc that does not work, and the library needs nothing else from CMake's CUDA support.
set(HOTOP_CUDA AUTO CACHE STRING "NVFP4 kernels for NVIDIA GPUs: AUTO, ON or OFF")
set_property(CACHE HOTOP_CUDA PROPERTY STRINGS AUTO ON OFF)

set(_cuda_sources "${CMAKE_CURRENT_LIST_DIR}/../csrc/nvfp4_cuda")
set(_cuda_compile "${CMAKE_CURRENT_LIST_DIR}/nvfp4_cuda_compile.cmake")
set(_nvcc_version "")
if(HOTOP_CUDA)
  find_program(HOTOP_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin)
  if(HOTOP_NVCC)
    execute_process(
      COMMAND "${HOTOP_NVCC}" --version
      OUTPUT_VARIABLE _nvcc_text
      ERROR_VARIABLE _nvcc_text
      RESULT_VARIABLE _nvcc_failed)
    if(NOT _nvcc_failed AND _nvcc_text MATCHES "release ([0-9]+\\.[0-9]+)")
      set(_nvcc_version "${CMAKE_MATCH_1}")
    endif()
  endif()
  if(_nvcc_version STREQUAL "")
    if(HOTOP_CUDA STREQUAL "AUTO")
      message(STATUS "hotop: no working nvcc (${HOTOP_NVCC}): built without the CUDA kernels")
    else()
      message(FATAL_ERROR "HOTOP_CUDA=${HOTOP_CUDA}, but there is no working nvcc: ${HOTOP_NVCC}. "
        "Set CUDA_HOME, or HOTOP_CUDA=OFF to build without the CUDA kernels.")
    endif()
  endif()
endif()

if(NOT _nvcc_version STREQUAL "")
  # Each target costs two seconds. The PTX of the newest plain one serves every GPU after it; the
  # cvt instruction for e2m1 needs sm_100f/sm_120f (or, before 12.9, sm_100a/sm_120a).
  set(_cuda_targets 80)
  if(_nvcc_version VERSION_GREATER_EQUAL 11.8)
    list(APPEND _cuda_targets 90)
  endif()
  list(GET _cuda_targets -1 _newest)
  set(_cuda_flags "-gencode=arch=compute_${_newest},code=compute_${_newest}")
  if(_nvcc_version VERSION_GREATER_EQUAL 12.9)
    list(APPEND _cuda_targets 100f 120f)
  elseif(_nvcc_version VERSION_GREATER_EQUAL 12.8)
    list(APPEND _cuda_targets 100a 120a)
  endif()
  foreach(_target IN LISTS _cuda_targets)
    list(APPEND _cuda_flags "-gencode=arch=compute_${_target},code=sm_${_target}")
  endforeach()
  # Exact division and no flush-to-zero are what makes the bytes equal to those of the CPU.
  list(APPEND _cuda_flags -std=c++17 -O3 --ftz=false --prec-div=true --fmad=false
    -shared -cudart=static -Xcompiler=-fPIC,-fvisibility=hidden)
  string(REPLACE ";" " " _cuda_flag_text "${_cuda_flags}")

  set(_cuda_library "${CMAKE_CURRENT_BINARY_DIR}/_nvfp4_cuda.so")
  add_custom_command(
    OUTPUT "${_cuda_library}"
    COMMAND "${CMAKE_COMMAND}" "-DNVCC=${HOTOP_NVCC}" "-DFLAGS=${_cuda_flag_text}"
      "-DSOURCE=${_cuda_sources}/quantize.cu" "-DLIBRARY=${_cuda_library}"
      "-DREQUIRED=${HOTOP_CUDA}" -P "${_cuda_compile}"
    DEPENDS "${_cuda_sources}/quantize.cu" "${_cuda_sources}/block.h" "${_cuda_sources}/job.h"
      "${_cuda_compile}"
    COMMENT "Compiling _nvfp4_cuda.so with nvcc ${_nvcc_version}"
    VERBATIM)
  add_custom_target(_nvfp4_cuda ALL DEPENDS "${_cuda_library}")
  install(FILES "${_cuda_library}" DESTINATION hotop OPTIONAL)
endif()
