// SPDX-License-Identifier: Apache-2.0
//
// A PJRT plug-in for one rank of several, made of one for all CPU devices of one process.
//
// The plug-in named by INNER_PLUGIN makes a device for each of WORLD_SIZE ranks. Here each device belongs to a process
// of its own, as on a TPU host, and only the one of RANK can be addressed. Everything else is passed on. The structures
// are the beginnings of those of XLA's pjrt_c_api.h, which only ever grow at their ends.

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct Error Error;  // NULL: none

struct Head {
  size_t size;
  void *extension;
};
struct ClientCreate {
  struct Head head;
  struct Option *options;
  size_t number_of_options;
};
struct Option {
  struct Head head;
  const char *name;
  size_t name_size;
  int kind;
  int64_t value;
  size_t value_size;
};
struct ClientProcessIndex {
  struct Head head;
  void *client;
  int process_index;
};
struct AddressableDevices {
  struct Head head;
  void *client;
  void *const *devices;
  size_t number_of_devices;
};
struct DeviceDescription {
  struct Head head;
  void *device;
  void *description;
};
struct DescriptionNumber {  // of Id and of ProcessIndex
  struct Head head;
  void *description;
  int number;
};
struct IsAddressable {
  struct Head head;
  void *device;
  _Bool is_addressable;
};
struct NumberOfOutputs {
  struct Head head;
  void *executable;
  size_t number;
};
struct OutputMemoryKinds {
  struct Head head;
  void *executable;
  size_t number_of_outputs;
  const char *const *kinds;
  const size_t *kind_sizes;
};

// The functions that matter here, by their place in the table.
enum {
  CLIENT_CREATE = 10,
  CLIENT_PROCESS_INDEX = 13,
  CLIENT_ADDRESSABLE_DEVICES = 16,
  DESCRIPTION_ID = 23,
  DESCRIPTION_PROCESS_INDEX = 24,
  DEVICE_DESCRIPTION = 29,
  DEVICE_IS_ADDRESSABLE = 30,
  EXECUTABLE_OUTPUTS = 44,
  EXECUTABLE_OUTPUT_MEMORY_KINDS = 47,
  MOST_FUNCTIONS = 512,
};
enum { OPTION_IS_INT64 = 1 };

struct Table {
  struct Head head;
  struct {
    struct Head head;
    int major, minor;
  } version;
  Error *(*functions[MOST_FUNCTIONS])(void *);
};

static const struct Table *inner;

static int number_in(const char *variable) {
  const char *text = getenv(variable);
  if (text == NULL) {
    fprintf(stderr, "one_device: %s is not set\n", variable);
    abort();
  }
  return atoi(text);
}

static struct Head head(size_t size) { return (struct Head){size, NULL}; }

static int device_id(void *device) {
  struct DeviceDescription of = {head(sizeof of), device, NULL};
  inner->functions[DEVICE_DESCRIPTION](&of);
  struct DescriptionNumber id = {head(sizeof id), of.description, -1};
  inner->functions[DESCRIPTION_ID](&id);
  return id.number;
}

// The caller's options are a TPU's.
static Error *client_create(void *arguments) {
  struct ClientCreate given = *(struct ClientCreate *)arguments;
  struct Option devices = {head(sizeof devices), "cpu_device_count", 16, OPTION_IS_INT64, number_in("WORLD_SIZE"), 1};
  struct ClientCreate *shared = arguments;
  shared->options = &devices;
  shared->number_of_options = 1;
  Error *error = inner->functions[CLIENT_CREATE](shared);
  shared->options = given.options;
  shared->number_of_options = given.number_of_options;
  return error;
}

static Error *client_process_index(void *arguments) {
  ((struct ClientProcessIndex *)arguments)->process_index = number_in("RANK");
  return NULL;
}

static Error *description_process_index(void *arguments) {
  return inner->functions[DESCRIPTION_ID](arguments);
}

static Error *client_addressable_devices(void *arguments) {
  Error *error = inner->functions[CLIENT_ADDRESSABLE_DEVICES](arguments);
  struct AddressableDevices *answer = arguments;
  for (size_t i = 0; error == NULL && i < answer->number_of_devices; i++) {
    if (device_id(answer->devices[i]) == number_in("RANK")) {
      answer->devices += i;
      answer->number_of_devices = 1;
    }
  }
  return error;
}

static Error *device_is_addressable(void *arguments) {
  struct IsAddressable *answer = arguments;
  answer->is_addressable = device_id(answer->device) == number_in("RANK");
  return NULL;
}

// The inner plug-in has no answer. What this one allocates stays with the executable, and so for the process's life.
static Error *executable_output_memory_kinds(void *arguments) {
  struct OutputMemoryKinds *answer = arguments;
  struct NumberOfOutputs outputs = {head(sizeof outputs), answer->executable, 0};
  Error *error = inner->functions[EXECUTABLE_OUTPUTS](&outputs);
  if (error != NULL) return error;
  const char **kinds = calloc(outputs.number + 1, sizeof *kinds);
  size_t *sizes = calloc(outputs.number + 1, sizeof *sizes);
  for (size_t i = 0; i < outputs.number; i++) {
    kinds[i] = "device";
    sizes[i] = strlen(kinds[i]);
  }
  answer->number_of_outputs = outputs.number;
  answer->kinds = kinds;
  answer->kind_sizes = sizes;
  return NULL;
}

const struct Table *GetPjrtApi(void) {
  static struct Table table;
  if (inner != NULL) return &table;
  const char *path = getenv("INNER_PLUGIN");
  void *library = path == NULL ? NULL : dlopen(path, RTLD_NOW | RTLD_LOCAL);
  const struct Table *(*get)(void) = NULL;
  if (library != NULL) *(void **)&get = dlsym(library, "GetPjrtApi");
  if (get == NULL) {
    fprintf(stderr, "one_device: INNER_PLUGIN: %s\n", path == NULL ? "not set" : dlerror());
    abort();
  }
  inner = get();
  memcpy(&table, inner, inner->head.size < sizeof table ? inner->head.size : sizeof table);
  table.functions[CLIENT_CREATE] = client_create;
  table.functions[CLIENT_PROCESS_INDEX] = client_process_index;
  table.functions[CLIENT_ADDRESSABLE_DEVICES] = client_addressable_devices;
  table.functions[DESCRIPTION_PROCESS_INDEX] = description_process_index;
  table.functions[DEVICE_IS_ADDRESSABLE] = device_is_addressable;
  table.functions[EXECUTABLE_OUTPUT_MEMORY_KINDS] = executable_output_memory_kinds;
  return &table;
}
