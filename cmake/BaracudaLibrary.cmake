# libbaracuda.a and what is installed with it: headers, the CMake package, the static CUDA runtime.

find_package(Threads REQUIRED)

file(GLOB_RECURSE sources CONFIGURE_DEPENDS csrc/*.cpp)
if(BARACUDA_WITH_CUDA)
  file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS csrc/*.cu)
  list(APPEND sources ${cuda_sources})
endif()
add_library(baracuda STATIC ${sources})

target_include_directories(baracuda PUBLIC csrc/include PRIVATE csrc)
target_include_directories(baracuda SYSTEM PUBLIC "${BARACUDA_DLPACK_DIR}")
target_compile_definitions(
  baracuda
  PRIVATE BARACUDA_WITH_CUDA=$<BOOL:${BARACUDA_WITH_CUDA}> BARACUDA_VERSION="${PROJECT_VERSION}"
)
target_compile_options(baracuda PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>)
if(BARACUDA_WERROR)
  target_compile_options(baracuda PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()

if(BARACUDA_SANITIZE)
  if(BARACUDA_WITH_CUDA)
    message(FATAL_ERROR "baracuda: BARACUDA_SANITIZE checks the CPU build; set BARACUDA_CUDA=OFF with it")
  endif()
  set(sanitizers -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_compile_options(baracuda PUBLIC ${sanitizers} -g)
  target_link_options(baracuda PUBLIC ${sanitizers})
endif()

if(BARACUDA_WITH_CUDA)
  target_include_directories(baracuda SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  # Lines for profilers and compute-sanitizer are two fifths of a kernel's bytes: not in releases.
  set(cuda_options --expt-relaxed-constexpr $<$<CONFIG:Debug,RelWithDebInfo>:-lineinfo> -Xcompiler=-Wall,-Wextra)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    # Kernels for several architectures take a third of the bytes.
    list(APPEND cuda_options --compress-mode=size)
  endif()
  if(BARACUDA_WERROR)
    list(APPEND cuda_options --Werror=all-warnings -Xcompiler=-Werror)
  endif()
  if(BARACUDA_RESOURCE_REPORT)
    list(APPEND cuda_options --resource-usage)
  endif()
  target_compile_options(baracuda PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${cuda_options}>")
  target_link_libraries(baracuda PUBLIC "${BARACUDA_CUDART_STATIC}")
  install(FILES "${BARACUDA_CUDART_STATIC}" DESTINATION lib)
endif()
target_link_libraries(baracuda PUBLIC Threads::Threads ${CMAKE_DL_LIBS} rt)

install(TARGETS baracuda ARCHIVE DESTINATION lib)
install(DIRECTORY csrc/include/baracuda DESTINATION include)
install(FILES "${BARACUDA_DLPACK_DIR}/dlpack/dlpack.h" LICENSE DESTINATION include/dlpack)

include(CMakePackageConfigHelpers)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/baracudaConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(
  FILES cmake/baracudaConfig.cmake "${PROJECT_BINARY_DIR}/baracudaConfigVersion.cmake"
  DESTINATION lib/cmake/baracuda
)
