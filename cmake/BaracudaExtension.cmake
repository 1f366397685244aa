# baracuda._core: the one extension module, Cython around the whole static library.

set(core_pyx "${PROJECT_SOURCE_DIR}/src/baracuda/_core.pyx")
set(core_c "${PROJECT_BINARY_DIR}/_core.c")
add_custom_command(
  OUTPUT "${core_c}"
  COMMAND
    "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/cmake/cythonize.py" -3 -Werror --depfile --module-name baracuda._core
    -I "${PROJECT_SOURCE_DIR}/src" -o "${core_c}" "${core_pyx}"
  DEPENDS "${core_pyx}" "${PROJECT_SOURCE_DIR}/cmake/cythonize.py"
  DEPFILE "${core_c}.dep"
  COMMENT "Cython src/baracuda/_core.pyx"
  VERBATIM
)

# The handler for JAX is built from the header that jaxlib ships, copied as dlpack.h is. Without it,
# importing baracuda.jax is an error that says so.
set(BARACUDA_XLA_INCLUDE_DIR "" CACHE PATH "The directory that holds xla/ffi/api/c_api.h")
if(BARACUDA_XLA_INCLUDE_DIR)
  set(xla_candidates "${BARACUDA_XLA_INCLUDE_DIR}")
else()
  baracuda_python_package_dirs(jaxlib xla_candidates)
  list(TRANSFORM xla_candidates APPEND /include)
endif()
set(xla OFF)
if(xla_candidates)
  find_file(xla_header xla/ffi/api/c_api.h PATHS ${xla_candidates} NO_DEFAULT_PATH NO_CACHE)
  if(xla_header)
    set(xla ON)
    configure_file("${xla_header}" "${PROJECT_BINARY_DIR}/xla_include/xla/ffi/api/c_api.h" COPYONLY)
  endif()
endif()
if(NOT xla)
  message(STATUS "baracuda: built without the handler for JAX; there is no jaxlib with its headers")
endif()

# One version of the stable ABI, or the ABI of the building Python where it is older than that.
set(sabi "")
if(SKBUILD_SABI_VERSION)
  set(sabi USE_SABI ${SKBUILD_SABI_VERSION})
endif()
python_add_library(_core MODULE WITH_SOABI ${sabi} "${core_c}" "${PROJECT_SOURCE_DIR}/src/baracuda/core/xla.cpp")
target_link_libraries(_core PRIVATE baracuda)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "import numpy; print(numpy.get_include())"
  OUTPUT_VARIABLE numpy_include
  OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY
)
target_include_directories(_core SYSTEM PRIVATE "${numpy_include}")
target_compile_definitions(_core PRIVATE NPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION BARACUDA_WITH_XLA=$<BOOL:${xla}>)
target_include_directories(_core PRIVATE "${PROJECT_SOURCE_DIR}/src/baracuda/core")
target_include_directories(_core SYSTEM PRIVATE "${PROJECT_BINARY_DIR}/xla_include")
# The yardstick of the benchmarks is not in the installed headers.
target_include_directories(_core PRIVATE "${PROJECT_SOURCE_DIR}/csrc")

# Exports the module's entry and nothing else: neither our own functions nor the CUDA runtime's.
set(exports "${PROJECT_SOURCE_DIR}/cmake/exports.map")
target_link_options(_core PRIVATE "LINKER:--exclude-libs,ALL" "LINKER:--version-script,${exports}")
set_target_properties(_core PROPERTIES LINK_DEPENDS "${exports}" LINKER_LANGUAGE CXX)

install(TARGETS _core LIBRARY DESTINATION .)
