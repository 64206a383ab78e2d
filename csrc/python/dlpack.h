// SPDX-License-Identifier: Apache-2.0
// The part of DLPack 1.x by which a framework shows its tensors to C code without a copy, a
// reference or its headers: struct by struct as in https://github.com/dmlc/dlpack, which keeps
// these layouts while the major version is 1.
#ifndef MAGI_PYTHON_DLPACK_H
#define MAGI_PYTHON_DLPACK_H

#include <stddef.h>
#include <stdint.h>

namespace magi::dlpack {

constexpr uint32_t kMajorVersion = 1;
constexpr const char* kCapsuleName = "dlpack_exchange_api";
constexpr uint8_t kFloat = 2;  // DLDataType::code

struct Version {
  uint32_t major, minor;
};

struct Device {
  int32_t type, id;
};

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};

// What a tensor is at this moment; shape and strides (in elements) lie inside the tensor.
struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

// The table behind `torch.Tensor.__dlpack_c_exchange_api__`. Only one of its functions is
// called here.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void (*managed_tensor_allocator)();
  void (*managed_tensor_from_py_object_no_sync)();
  void (*managed_tensor_to_py_object_no_sync)();
  int (*dltensor_from_py_object_no_sync)(
      void* py_object, Tensor* out);  // may be NULL; -1: a Python exception is set
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** out);
};

static_assert(sizeof(Tensor) == 48 && offsetof(Tensor, shape) == 24,
              "DLTensor of DLPack 1.x on 64-bit machines");
static_assert(offsetof(ExchangeApi, dltensor_from_py_object_no_sync) == 40,
              "DLPackExchangeAPI of DLPack 1.x");

}  // namespace magi::dlpack

#endif  // MAGI_PYTHON_DLPACK_H
