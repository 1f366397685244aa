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

# One version of the stable ABI, or the ABI of the building Python where it is older than that.
set(sabi "")
if(SKBUILD_SABI_VERSION)
  set(sabi USE_SABI ${SKBUILD_SABI_VERSION})
endif()
python_add_library(_core MODULE WITH_SOABI ${sabi} "${core_c}")
target_link_libraries(_core PRIVATE baracuda)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "import numpy; print(numpy.get_include())"
  OUTPUT_VARIABLE numpy_include
  OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY
)
target_include_directories(_core SYSTEM PRIVATE "${numpy_include}")
target_compile_definitions(_core PRIVATE NPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION)
# The yardstick of the benchmarks is not in the installed headers.
target_include_directories(_core PRIVATE "${PROJECT_SOURCE_DIR}/csrc")

# Exports the module's entry and nothing else: neither our own functions nor the CUDA runtime's.
set(exports "${PROJECT_SOURCE_DIR}/cmake/exports.map")
target_link_options(_core PRIVATE "LINKER:--exclude-libs,ALL" "LINKER:--version-script,${exports}")
set_target_properties(_core PROPERTIES LINK_DEPENDS "${exports}" LINKER_LANGUAGE CXX)

install(TARGETS _core LIBRARY DESTINATION .)
