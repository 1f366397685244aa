# dlpack/dlpack.h from BARACUDA_DLPACK_INCLUDE_DIR, the Python package apache-tvm-ffi or the system.
#
# It is copied into the build tree, so that compile commands (and ccache) don't depend on the path
# of a temporary environment. Sets BARACUDA_DLPACK_DIR to that copy.

if(BARACUDA_DLPACK_INCLUDE_DIR)
  set(candidates "${BARACUDA_DLPACK_INCLUDE_DIR}")
else()
  baracuda_python_package_dirs(tvm_ffi candidates)
  list(TRANSFORM candidates APPEND /include)
  list(APPEND candidates /usr/local/include /usr/include)
endif()

find_file(dlpack_header dlpack/dlpack.h PATHS ${candidates} NO_DEFAULT_PATH NO_CACHE)
if(NOT dlpack_header)
  message(
    FATAL_ERROR
    "baracuda: dlpack/dlpack.h was not found in: ${candidates}. Install the Python package "
    "apache-tvm-ffi or DLPack itself, or set BARACUDA_DLPACK_INCLUDE_DIR."
  )
endif()
file(STRINGS "${dlpack_header}" dlpack_version REGEX "^#define DLPACK_(MAJOR|MINOR)_VERSION")
string(REGEX REPLACE "[^0-9]*([0-9]+)[^0-9]+([0-9]+).*" "\\1.\\2" dlpack_version "${dlpack_version}")
if(dlpack_version VERSION_LESS 1.1)
  message(FATAL_ERROR "baracuda: DLPack 1.1 or newer is needed; ${dlpack_header} is ${dlpack_version}")
endif()

set(BARACUDA_DLPACK_DIR "${PROJECT_BINARY_DIR}/include")
configure_file("${dlpack_header}" "${BARACUDA_DLPACK_DIR}/dlpack/dlpack.h" COPYONLY)
