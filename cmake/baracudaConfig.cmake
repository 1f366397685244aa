# The CMake package of baracuda's C library: the target baracuda::baracuda.
#
#   find_package(baracuda REQUIRED)
#   target_link_libraries(program PRIVATE baracuda::baracuda)
#
# baracuda_WITH_CUDA says whether the CUDA kernels were built.

include(CMakeFindDependencyMacro)
find_dependency(Threads)

cmake_path(SET _baracuda_root NORMALIZE "${CMAKE_CURRENT_LIST_DIR}/../../..")
set(_baracuda_libraries "stdc++" Threads::Threads dl rt)
set(baracuda_WITH_CUDA OFF)
if(EXISTS "${_baracuda_root}/lib/libcudart_static.a")
  set(baracuda_WITH_CUDA ON)
  list(PREPEND _baracuda_libraries "${_baracuda_root}/lib/libcudart_static.a")
endif()

if(NOT TARGET baracuda::baracuda)
  add_library(baracuda::baracuda STATIC IMPORTED)
  set_target_properties(
    baracuda::baracuda
    PROPERTIES
      IMPORTED_LOCATION "${_baracuda_root}/lib/libbaracuda.a"
      INTERFACE_INCLUDE_DIRECTORIES "${_baracuda_root}/include"
      INTERFACE_LINK_LIBRARIES "${_baracuda_libraries}"
  )
endif()

unset(_baracuda_libraries)
unset(_baracuda_root)
