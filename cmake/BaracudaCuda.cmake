# Decides whether the CUDA kernels are built and by which compiler, then enables the language.
#
# Sets BARACUDA_WITH_CUDA (ON or OFF). With CUDA also CMAKE_CUDA_ARCHITECTURES and
# BARACUDA_CUDART_STATIC, the path of libcudart_static.a.
#
# build_backend/baracuda_build.py applies the same rules to decide whether a build requires NVIDIA's
# compiler wheels.

set(BARACUDA_CUDA AUTO CACHE STRING "Build the CUDA kernels: ON, OFF, or AUTO: ON where there is an nvcc or a GPU")
set_property(CACHE BARACUDA_CUDA PROPERTY STRINGS AUTO ON OFF)

# The compiler that is on the machine: CUDACXX, CUDA_HOME, PATH, /usr/local/cuda.
function(baracuda_find_system_nvcc out)
  if(DEFINED CMAKE_CUDA_COMPILER)
    set(nvcc "${CMAKE_CUDA_COMPILER}")
  elseif(NOT "$ENV{CUDACXX}" STREQUAL "")
    find_program(nvcc NAMES "$ENV{CUDACXX}" NO_CACHE)
  else()
    set(home "")
    if(NOT "$ENV{CUDA_HOME}" STREQUAL "")
      set(home "$ENV{CUDA_HOME}/bin")
    endif()
    find_program(nvcc NAMES nvcc PATHS ${home} ENV PATH /usr/local/cuda/bin NO_DEFAULT_PATH NO_CACHE)
  endif()
  if(NOT nvcc)
    set(nvcc "")
  endif()
  set(${out} "${nvcc}" PARENT_SCOPE)
endfunction()

# The compiler of NVIDIA's wheels, where the building Python has them.
function(baracuda_find_wheel_nvcc out)
  baracuda_python_package_dirs(nvidia dirs)
  set(nvcc "")
  foreach(dir IN LISTS dirs)
    if(EXISTS "${dir}/cu13/bin/nvcc")
      set(nvcc "${dir}/cu13/bin/nvcc")
      break()
    endif()
  endforeach()
  set(${out} "${nvcc}" PARENT_SCOPE)
endfunction()

set(gpu OFF)
find_program(nvidia_smi nvidia-smi NO_CACHE)
if(nvidia_smi OR EXISTS /dev/nvidia0)
  set(gpu ON)
endif()

string(TOUPPER "${BARACUDA_CUDA}" wanted)
set(BARACUDA_WITH_CUDA OFF)
if(wanted STREQUAL "AUTO" OR wanted)
  baracuda_find_system_nvcc(nvcc)
  if(wanted STREQUAL "AUTO" AND NOT nvcc AND NOT gpu)
    set(reason "neither an nvcc nor a GPU was found; BARACUDA_CUDA=ON builds the kernels all the same")
  else()
    if(NOT nvcc)
      baracuda_find_wheel_nvcc(nvcc)
      if(NOT nvcc)
        message(
          FATAL_ERROR
          "baracuda: CUDA is wanted, and there is no nvcc in CUDACXX, CUDA_HOME, PATH, "
          "/usr/local/cuda or among the Python packages. A build with pip fetches NVIDIA's "
          "compiler wheels; set BARACUDA_CUDA=OFF to build for the CPU alone."
        )
      endif()
      # The wheels have lib and no lib64, which is where nvcc looks.
      cmake_path(GET nvcc PARENT_PATH bin)
      cmake_path(GET bin PARENT_PATH root)
      set(CMAKE_CUDA_FLAGS_INIT "${CMAKE_CUDA_FLAGS_INIT} -L${root}/lib")
    endif()
    set(BARACUDA_WITH_CUDA ON)
  endif()
else()
  set(reason "as asked by BARACUDA_CUDA")
endif()

if(NOT BARACUDA_WITH_CUDA)
  message(STATUS "baracuda: built for the CPU alone, ${reason}")
  return()
endif()

if(NOT CMAKE_CUDA_ARCHITECTURES)
  if(gpu)
    set(CMAKE_CUDA_ARCHITECTURES native)
  else()
    set(CMAKE_CUDA_ARCHITECTURES 90)
  endif()
endif()
set(CMAKE_CUDA_COMPILER "${nvcc}")
enable_language(CUDA)

# The static runtime is linked by name, in this build and in the installed package alike.
set(CMAKE_CUDA_RUNTIME_LIBRARY None)
cmake_path(GET CMAKE_CUDA_COMPILER PARENT_PATH bin)
cmake_path(GET bin PARENT_PATH root)
find_library(
  BARACUDA_CUDART_STATIC
  cudart_static
  PATHS
    ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES}
    ${CMAKE_CUDA_HOST_IMPLICIT_LINK_DIRECTORIES}
    "${root}/lib64"
    "${root}/lib"
  NO_DEFAULT_PATH
  REQUIRED
)
message(
  STATUS
  "baracuda: built with CUDA, architectures ${CMAKE_CUDA_ARCHITECTURES}, "
  "nvcc ${CMAKE_CUDA_COMPILER_VERSION} (${CMAKE_CUDA_COMPILER})"
)
